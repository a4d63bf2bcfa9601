"""A composition that is kept is the one that Hydra makes."""

import threading

import pytest
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from conftest import LINEAR_STACK, SMALL
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare import compositions
from meshloom.compiler.declare.choices import model_of
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.compositions import compositions_kept, forget_compositions

LINES = [
    ("seed=3",),
    ("model.num_layers=2", "mesh.tensor=2", "sharding=fsdp_tensor"),
    ("sharding=fsdp_tensor", "mesh.tensor=4"),
    ("run.extra={a: 1}", "++run.extra.b=${seed}", "seed=5"),
    ("~model.num_kv_heads", "+model.num_kv_heads=2"),
    (*SMALL, *LINEAR_STACK),
    ("~experiment", "num_steps=3"),
    ("model=llama3_8b", "target=v5e-16", "remat=full"),
    ("experiment=smoke", "num_steps=7"),
    ("compiler_options.xla_a=1", "compiler_options.xla_b=2"),
    ("compiler_options={xla_c: 3}",),
    ("seed=3",),
]


@pytest.mark.ci
def test_kept_compositions_are_those_of_hydra(monkeypatch):
    """In this order each comes after another of the same choices, whose values must not be left in it."""
    with monkeypatch.context() as patched:
        patched.setattr(compositions, "_kept_for", lambda *_: None)  # Hydra composes each
        fresh = [(read_spec(Request(line), lambda spec: spec), model_of(Request(line))) for line in LINES]
    for _ in range(2):
        assert [(read_spec(Request(line), lambda spec: spec), model_of(Request(line))) for line in LINES] == fresh


def test_hydra_composes_once_for_all_values_of_the_same_choices(monkeypatch):
    composed = list[str]()
    hydras = compositions.compose
    monkeypatch.setattr(compositions, "compose", lambda *args, **kw: composed.append("") or hydras(*args, **kw))
    forget_compositions()
    for line in (("seed=3",), ("seed=4", "mesh.fsdp=2"), ("seed=3",), ("model=llama3_8b",)):
        read_spec(Request(line), lambda spec: spec)
    assert len(composed) == 2


@pytest.mark.parametrize("line", [("seed=x",), ("model.num_layers.deep=1",), ("seed=${nobody}",), ("model=nobody",)])
def test_mistakes_are_the_same(line):
    def said() -> str:
        with pytest.raises(ConfigError) as caught:
            read_spec(Request(line), lambda spec: spec)
        return str(caught.value)

    forget_compositions()
    fresh = said()
    read_spec(Request(()), lambda spec: spec)
    assert said() == fresh
    assert said() == fresh


def test_files_of_users_are_read_again_unless_they_are_kept(tmp_path):
    (tmp_path / "experiment").mkdir()
    file, request = (
        tmp_path / "experiment" / "mine.yaml",
        Request(("experiment=mine", f"hydra.searchpath=[meshloom://targets,'file://{tmp_path}']")),
    )

    def seed(number: int) -> int:
        file.write_text(f"# @package _global_\nseed: {number}\n")
        return read_spec(request, lambda spec: spec).seed

    assert [seed(3), seed(4)] == [3, 4]
    with compositions_kept():
        assert [seed(5), seed(6)] == [5, 5]
    assert seed(7) == 7


def test_threads_that_read_at_once_leave_nothing_kept(tmp_path):
    """One ends while the other still reads, so what it found at its start is not what there is at its end."""
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    request = Request(("experiment=mine", f"hydra.searchpath=[meshloom://targets,'file://{tmp_path}']"))
    is_first, is_over = threading.Event(), threading.Event()

    def reads() -> None:
        with compositions_kept():
            is_first.set()
            assert is_over.wait(60)

    def seed(number: int) -> int:
        file.write_text(f"# @package _global_\nseed: {number}\n")
        return read_spec(request, lambda spec: spec).seed

    other = threading.Thread(target=reads)
    with compositions_kept():
        other.start()
        assert is_first.wait(60)
    is_over.set()
    other.join()
    assert [seed(3), seed(4)] == [3, 4]


def test_files_that_a_package_plugs_in_are_read_again(tmp_path, monkeypatch):
    (tmp_path / "experiment").mkdir()

    class Plugged(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            search_path.append("plugged", f"file://{tmp_path}")

    monkeypatch.setitem(Plugins.instance().plugin_type_to_subclass_list, SearchPathPlugin, [Plugged])

    def seed(number: int) -> int:
        (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\nseed: {number}\n")
        return read_spec(Request(("experiment=mine",)), lambda spec: spec).seed

    assert [seed(3), seed(4)] == [3, 4]
