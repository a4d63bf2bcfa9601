"""A kill while weights are read, or while an adapter is written, leaves nothing that passes for whole."""

import signal
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from conftest import SMALL, spec_of
from meshloom.runtime.weights.write import TENSORS, write_peft_folder
from support.commands import run_in_process
from support.forked import start
from support.published import write_published

pytestmark = pytest.mark.ci
READING = """
    import sys, time
    from pathlib import Path
    import meshloom.runtime.weights.load as read
    from meshloom.runtime.cli.main import run

    real, count = read._read_one, []

    def slowed(*operands):
        count.append(1)
        if len(count) == 3:
            Path("reached").touch()
            time.sleep(600)
        return real(*operands)

    read._read_one = slowed
    run(sys.argv[1:])
"""
WRITING = """
    import os, sys, time
    from pathlib import Path
    import numpy as np
    from meshloom.runtime.weights.write import write_peft_folder

    def stuck(descriptor):
        Path("reached").touch()
        time.sleep(600)

    os.fsync = stuck
    write_peft_folder(Path("out"), {"a": np.ones(1000, np.float32)}, {"r": 1})
"""


def _killed_at(code: str, *words: str, cwd: Path) -> None:
    """Runs a program in a process of its own, until it says where it is, and kills it there."""
    with (cwd / "said").open("wb") as said:
        process = start(["-c", textwrap.dedent(code), *words], cwd=cwd, stdout=said, stderr=said)
        while not (cwd / "reached").exists():
            assert process.poll() is None, (cwd / "said").read_text()
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


def test_a_run_that_is_killed_while_it_reads_weights_has_none_and_begins_again(tmp_path):
    write_published(tmp_path / "hf", spec_of(*SMALL).model)
    words = ("train", *SMALL, "checkpoint.weights_from=hf:hf", "target=cpu-1", "num_steps=1", "hydra.run.dir=run")
    words = (*words, "schedule.num_warmup_steps=0")
    _killed_at(READING, *words, cwd=tmp_path)
    for command in (("generate", "run", "prompt=a"), ("export", "run", "directory=out")):
        done = run_in_process(*command, cwd=tmp_path)
        assert done.returncode == 2
        assert "there is no finished checkpoint in run/checkpoints" in done.stderr
    assert not (tmp_path / "out").exists()
    done = run_in_process(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/checkpoints/1").is_dir()


def test_an_adapter_that_is_killed_while_it_is_written_is_not_there_and_is_written_again(tmp_path):
    _killed_at(WRITING, cwd=tmp_path)
    assert (tmp_path / "out.unfinished").is_dir()
    assert not (tmp_path / "out").exists()
    write_peft_folder(tmp_path / "out", {"a": np.ones(1000, np.float32)}, {"r": 1})
    assert not (tmp_path / "out.unfinished").exists()
    assert (tmp_path / "out" / TENSORS).stat().st_size > 4000
