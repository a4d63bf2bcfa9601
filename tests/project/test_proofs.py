"""Proofs: what makes a key another, and that only a test that passes is recorded, by a pytest of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from support.proofs import ROOT, TABLE, judges, key_of, read_table, updated, write_table

TEST = """
import jax.numpy as jnp
import pytest
from support.proofs import Computation

@pytest.mark.parametrize("limit", [10, 0])
def test_the_sum_is_less(limit, proof):
    computation = Computation(lambda x: x.sum(), jnp.ones(3))
    if proof.is_known(computation.parts):
        return
    assert computation.run() < limit
"""


def lowered(function, *operands):
    return jax.jit(function, donate_argnums=0).lower(*operands)


def test_a_key_depends_on_programs_arrays_and_texts():
    x = np.arange(4.0, dtype=np.float32)
    doubled = lowered(lambda x: 2 * x, x)
    parts = ([doubled], {"inputs": x}, "of a reference")
    others = [
        ([lowered(lambda x: 3 * x, x)], *parts[1:]),
        ([jax.jit(lambda x: 2 * x).lower(x)], *parts[1:]),  # nothing is donated
        ([doubled], {"inputs": x[::-1]}, parts[2]),
        ([doubled], {"inputs": x.reshape(2, 2)}, parts[2]),
        ([doubled], {"inputs": x.view(np.int32)}, parts[2]),
        ([doubled], {"targets": x}, parts[2]),
        (*parts[:2], "of another"),
    ]
    assert key_of("judge", parts) == key_of("judge", ([lowered(lambda x: 2 * x, x)], {"inputs": x.copy()}, parts[2]))
    keys = [key_of("judge", each) for each in (parts, *others)] + [key_of("another judge", parts)]
    assert len(set(keys)) == len(keys)


def repository(folder: Path) -> Path:
    """Returns a test that uses a proof, with what judges it."""
    for name in ("tests/support", "tests/unit", "models"):
        (folder / name).mkdir(parents=True)
    for name in ("proofs", "tiers"):
        shutil.copy(ROOT / f"tests/support/{name}.py", folder / f"tests/support/{name}.py")
    (folder / "tests/conftest.py").write_text(
        'pytest_plugins = ("support.proofs",)\n\ndef pytest_addoption(parser):\n'
        '    parser.addoption("--tier", default=("plain", "ci"))\n'
    )
    (folder / "models/parts.py").write_text("WIDTH = 3\n")
    test = folder / "tests/unit/test_sum.py"
    test.write_text(TEST)
    return test


def test_sources_that_judge_are_in_the_key(tmp_path, monkeypatch):
    test = repository(tmp_path)

    def now() -> str:
        judges.cache_clear()
        return judges(test, tmp_path)

    found = [now()]
    for path in ("tests/unit/test_sum.py", "tests/support/proofs.py", "tests/conftest.py", "models/parts.py"):
        with (tmp_path / path).open("a") as file:
            file.write("# changed\n")
        found.append(now())
    (tmp_path / "tests/support/unused.py").write_text("")
    assert now() == found[-1], "the test does not name it"
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    found.append(now())
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true --xla_cpu_enable_fast_math=true")
    assert now() == found[-1], "so it is in a worker"
    assert len(set(found)) == len(found)


@pytest.mark.ci
def test_what_passes_is_recorded_and_not_run_again(tmp_path, monkeypatch):
    repository(tmp_path)

    def run(*options: str) -> str:
        ours = ("-c", "/dev/null", f"--rootdir={tmp_path}", f"--override-ini=pythonpath={tmp_path}/tests")
        command = [sys.executable, "-m", "pytest", "--import-mode=importlib", *ours, *options, str(tmp_path / "tests")]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout

    passes, fails = (f"tests/unit/test_sum.py::test_the_sum_is_less[{limit}]" for limit in (10, 0))
    assert "proofs: 0 tests known, 2 compiled and run" in run()
    assert not (tmp_path / TABLE).exists(), "it is recorded on request"
    with monkeypatch.context() as update:
        update.setenv("MESHLOOM_UPDATE", "1")
        assert "1 failed, 1 passed" in run()
    table = read_table((tmp_path / TABLE).read_text())
    assert [*table] == [passes]
    (tmp_path / TABLE).write_text(write_table(table | {fails: table[passes]}))
    output = run()
    assert "proofs: 1 tests known, 1 compiled and run" in output
    assert "1 failed, 1 passed" in output, "a key of another test proves nothing"
    assert "proofs: 0 tests known, 2 compiled and run" in run("--prove-again")


def test_a_table_loses_what_is_gone():
    here = "tests/project/test_proofs.py"
    before = {f"{here}::test_a": "1", f"{here}::test_b": "2", "tests/gone.py::test_c": "3", "tests/conftest.py::d": "4"}
    proven = {f"{here}::test_a": "5"}
    some = updated(before, proven, run_files={here}, is_whole=False)
    assert some == {f"{here}::test_a": "5", f"{here}::test_b": "2", "tests/conftest.py::d": "4"}
    whole = updated(before, proven, run_files={here}, is_whole=True)
    assert whole == {f"{here}::test_a": "5", "tests/conftest.py::d": "4"}


def test_the_table_is_sorted_and_of_tests_that_are_here():
    text = (ROOT / TABLE).read_text()
    table = read_table(text)
    assert write_table(table) == text
    unknown = [test for test in table if not (ROOT / test.partition("::")[0]).is_file()]
    assert not unknown, "record again (docs/testing.md)"
    for test in table:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), test
