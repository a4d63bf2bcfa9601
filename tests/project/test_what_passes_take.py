"""Passes take what they read. A function with a whole plan or declaration may depend on anything in it."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = {"Plan": 90, "RunSpec": 36}  # functions; a bound is lowered, never raised


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("modules")


@pytest.mark.parametrize("kind", MOST)
def test_no_more_functions_take_the_whole(modules, kind):
    takers = modules.takers_of(ROOT, kind)
    assert sum(map(len, takers.values())) <= MOST[kind], takers


def test_parameters_are_found_as_they_are_annotated(modules, tmp_path):
    (tmp_path / "compiler").mkdir()
    lines = (
        "def one(plan: Plan, x: int): ...",
        "def two(*, plan: 'Plan[RunSpec]'): ...",
        "def three(plans: list[Plan]): ...",
        "class A:\n    def four(self, plan: Plan | None): ...",
        "def five(plan: StepPlan): ...",
    )
    (tmp_path / "compiler" / "file.py").write_text("\n".join(lines))
    assert modules.takers_of(tmp_path, "Plan") == {"compiler/file.py": ["one", "two", "four"]}


def test_names_are_found_in_code_and_conf_but_not_in_docs(modules, tmp_path):
    (tmp_path / "compiler").mkdir()
    (tmp_path / "conf").mkdir()
    (tmp_path / "compiler" / "named.py").write_text("kind = 'as h100 has it'")
    (tmp_path / "compiler" / "documented.py").write_text('"""As h100 has it."""\nh1000 = 1')
    (tmp_path / "conf" / "named.yaml").write_text("name: h100")
    (tmp_path / "conf" / "commented.yaml").write_text("name: b200  # as h100")
    assert modules.files_naming(tmp_path, "h100") == ["compiler/named.py", "conf/named.yaml"]
