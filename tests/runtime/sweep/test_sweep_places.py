"""Where the points of a sweep save."""

import pytest

from support.helpers import run_in_process


@pytest.mark.ci
def test_points_do_not_save_in_one_folder(tmp_path):
    done = run_in_process("train", "-m", "target=cpu-2", "seed=1,2", "checkpoint.directory=saved", cwd=tmp_path)
    assert done.returncode == 2
    assert "checkpoint.directory: all points would save in one folder" in done.stderr
    assert not any(tmp_path.iterdir())
