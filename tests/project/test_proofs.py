"""Proofs: what makes a key another, and that only a test that passes is recorded, by a pytest of its own."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from support.commands import run_python
from support.proofs import ROOT, TABLE, code_of, judges, key_of, ran_whole_files, read_table, updated, write_table

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


@pytest.fixture(params=["setup", "teardown"])
def part(request):
    assert request.param != "setup"
    yield
    assert request.param != "teardown"


def test_a_part_fails(part, proof):
    assert not proof.is_known("nothing")
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


def test_a_key_depends_on_which_operands_are_used():
    x = np.arange(4.0, dtype=np.float32)
    first, second = (jax.jit(lambda x, y, i=i: 2 * (x, y)[i]).lower(x, x) for i in (0, 1))
    assert first.as_text() == second.as_text()
    assert key_of("judge", [first]) != key_of("judge", [second])


def repository(folder: Path) -> Path:
    """Returns a test that uses a proof, with what judges it."""
    for name in ("tests/support", "tests/unit", "models/published", "compiler/core"):
        (folder / name).mkdir(parents=True)
    for name in ("proofs", "tiers"):
        shutil.copy(ROOT / f"tests/support/{name}.py", folder / f"tests/support/{name}.py")
    (folder / "tests/conftest.py").write_text(
        'pytest_plugins = ("support.proofs",)\n\ndef pytest_addoption(parser):\n'
        '    parser.addoption("--tier", default=("plain", "ci"))\n'
    )
    (folder / "models/parts.py").write_text('"""Layers."""\nimport jax\n')
    for name in ("config", "published/llama"):
        (folder / f"models/{name}.py").write_text("WIDTH = 3\n")
    (folder / "compiler/core/trees.py").write_text("")
    test = folder / "tests/unit/test_sum.py"
    test.write_text(TEST)
    return test


def test_sources_that_judge_are_in_the_key(tmp_path, monkeypatch):
    test = repository(tmp_path)

    def now() -> str:
        judges.cache_clear()
        code_of.cache_clear()
        return judges(test, tmp_path)

    def change(path: str, line: str) -> None:
        with (tmp_path / path).open("a") as file:
            file.write(line)

    found = [now()]
    judging = ("unit/test_sum.py", "support/proofs.py", "conftest.py")
    for path in (*(f"tests/{name}" for name in judging), "models/parts.py", "compiler/core/trees.py"):
        change(path, "CHANGED = True\n")
        found.append(now())
        change(path, "# in other words\n")
        assert now() == found[-1], "a comment judges nothing"
    parts = tmp_path / "models/parts.py"
    parts.write_text(parts.read_text().replace("Layers.", "What layers are made of."))
    assert now() == found[-1], "and neither does a docstring"
    for path in ("models/config.py", "models/published/llama.py"):
        change(path, "WIDTH = 4\n")
        assert now() == found[-1], "it declares"
    (tmp_path / "tests/support/unused.py").write_text("")
    assert now() == found[-1], "the test does not name it"
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    found.append(now())
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true --xla_cpu_enable_fast_math=true")
    assert now() == found[-1], "so it is in a worker"
    assert len(set(found)) == len(found)


@pytest.mark.ci
def test_what_passes_is_recorded_and_not_run_again(tmp_path):
    repository(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "MESHLOOM_UPDATE"}

    def run(*options: str, **more: str) -> str:
        ours = ("-c", "/dev/null", f"--rootdir={tmp_path}", f"--override-ini=pythonpath={tmp_path}/tests")
        words = ("-m", "pytest", "--import-mode=importlib", *ours, *options, str(tmp_path / "tests"))
        return run_python(*words, cwd=tmp_path, env=environment | more).stdout

    passes, fails = (f"tests/unit/test_sum.py::test_the_sum_is_less[{limit}]" for limit in (10, 0))
    broken = [f"tests/unit/test_sum.py::test_a_part_fails[{part}]" for part in ("setup", "teardown")]
    assert "proofs: 0 tests known, 3 compiled and run" in run()
    assert not (tmp_path / TABLE).exists(), "it is recorded on request"
    output = run(MESHLOOM_UPDATE="1")
    assert "1 failed, 2 passed" in output
    assert "2 errors" in output
    table = read_table((tmp_path / TABLE).read_text())
    assert [*table] == [passes]
    (tmp_path / TABLE).write_text(write_table(table | dict.fromkeys([fails, *broken], table[passes])))
    output = run()
    assert "proofs: 1 tests known, 2 compiled and run" in output
    assert "1 failed, 2 passed" in output, "a key of another test proves nothing"
    assert "proofs: 0 tests known, 3 compiled and run" in run("--prove-again", "-k", "sum or part", MESHLOOM_UPDATE="1")
    assert [*read_table((tmp_path / TABLE).read_text())] == [passes], "what fails is no longer proven"


def test_a_table_loses_what_is_gone():
    here = "tests/project/test_proofs.py"
    before = {f"{here}::test_a": "1", f"{here}::test_b": "2", "tests/gone.py::test_c": "3", "tests/conftest.py::d": "4"}
    proven = {f"{here}::test_a": "5"}
    some = updated(before, proven, (), run_files={here}, is_whole=False)
    assert some == {f"{here}::test_a": "5", f"{here}::test_b": "2", "tests/conftest.py::d": "4"}
    without_failed = {f"{here}::test_a": "5", "tests/conftest.py::d": "4"}
    assert updated(before, proven, {f"{here}::test_b"}, run_files={here}, is_whole=False) == without_failed
    assert updated(before, proven, {here}, run_files={here}, is_whole=False) == without_failed
    whole = updated(before, proven, (), run_files={here}, is_whole=True)
    assert whole == {f"{here}::test_a": "5", "tests/conftest.py::d": "4"}


@pytest.mark.parametrize(
    ("options", "exit_status", "expected"),
    [
        ({}, 0, True),
        ({}, 1, True),
        ({}, 2, False),  # interrupted
        ({"maxfail": 1}, 1, False),
        ({"lf": True}, 0, False),
        ({"stepwise": True}, 1, False),
        ({"keyword": "sum"}, 0, False),
        ({"markexpr": "ci"}, 0, False),
        ({"deselect": ["tests/unit"]}, 0, False),
        ({"tier": ("ci",)}, 0, False),
        ({"args": ["tests/unit/test_sum.py::test_a"]}, 0, False),
    ],
)
def test_files_are_run_as_a_whole_unless_something_chose_tests(options, exit_status, expected):
    def option(name: str, default: Any = None) -> Any:
        return ({"tier": ("plain", "ci")} | options).get(name, default)

    config = SimpleNamespace(getoption=option, args=options.get("args", ["tests/unit"]))
    assert ran_whole_files(cast(pytest.Config, config), exit_status) == expected


def test_the_table_is_sorted_and_of_tests_that_are_here():
    text = (ROOT / TABLE).read_text()
    table = read_table(text)
    assert write_table(table) == text
    unknown = [test for test in table if not (ROOT / test.partition("::")[0]).is_file()]
    assert not unknown, "record again (docs/testing.md)"
    for test in table:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), test
