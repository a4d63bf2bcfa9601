"""Each run keeps its compiled programs in the folder that it declares."""

import jax
import numpy as np
import pytest

from meshloom.runtime.compile.compile_cache import cached_compilation


@pytest.fixture(autouse=True)
def settings_put_back():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_process_keeps_programs_in_the_folder_of_each_run(tmp_path):
    found = []
    for name, factor in (("first", 2.0), ("second", 3.0), ("second", 3.0), (None, 3.0)):
        with cached_compilation(name and str(tmp_path / name)) as use:
            assert jax.jit(lambda x, factor=factor: x * factor)(np.float32(2)) == 2 * factor
        found.append(use.num_hits)
    assert found == [0, 0, 1, 0]
    assert all([*(tmp_path / name).glob("jit__lambda*-cache")] for name in ("first", "second"))
