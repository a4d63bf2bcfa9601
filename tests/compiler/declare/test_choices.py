"""What a run's model is called, wherever its keys were set."""

import pytest
from hydra import compose

from meshloom.compiler.declare.choices import chosen_model
from meshloom.compiler.declare.compose import Request, hydra_session
from meshloom.compiler.declare.hydra_settings import search_path_override


def named(*overrides: str, config_name: str = "config") -> str | None:
    with hydra_session(Request(overrides)):
        composed = compose(config_name, overrides=list(overrides), return_hydra_config=True)
        return chosen_model(composed, composed.hydra)


@pytest.mark.cases(plain=5)
@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ((), "tiny"),
        (("model=llama2_7b",), "llama2_7b"),
        (("experiment=smoke", "model=qwen3_8b"), "qwen3_8b"),
        (("model=llama2_7b", "model.num_layers=32", "seed=3"), "llama2_7b"),
        (("model=llama2_7b", "model.num_layers=4"), "llama2_7b (num_layers=4)"),
        (("model=gemma2_9b", "model.attention_windows=[4096]"), "gemma2_9b (attention_windows=[4096])"),
        (("model.num_layers=${num_microbatches}",), "tiny (num_layers=${num_microbatches})"),
        (
            ("model.head_dim=8", "model.mlp=plain", "model.mlp_dim=8", "model.qk_norm=rms"),
            "tiny (mlp=plain, qk_norm=rms and 2 more)",
        ),
        (("model=linear_stack", "model.family=my_package.models:Mine"), None),
        (("model=linear_stack", "model.family=my_package.models:Mine", "~model.embed_dim"), None),
        (("model=linear_stack", "~model.embed_dim"), "linear_stack (~embed_dim)"),
    ],
)
def test_the_option_and_what_is_set_otherwise(overrides, name):
    assert named(*overrides) == name


@pytest.fixture
def places(tmp_path) -> list[str]:
    files = {
        "model/mine.yaml": "defaults: [llama3_8b, _self_]\nnum_layers: 2\n",
        "experiment/shallow.yaml": "# @package _global_\ndefaults:\n  - override /model: mine\nmodel:\n  mlp_dim: 64\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return search_path_override((), str(tmp_path))


def test_a_users_option_and_what_an_experiment_changes_of_it(places):
    assert named(*places, "model=mine") == "mine"
    assert named(*places, "experiment=shallow") == "mine (mlp_dim=64)"
    assert named(*places, "experiment=shallow", "model.mlp_dim=14336") == "mine"


def test_a_model_without_an_option_has_no_name():
    assert named("~model", "+model={family: linear_stack}") is None
