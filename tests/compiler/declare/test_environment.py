"""Variables of the environment: a tool's own go before our defaults, nothing is not set, and nonsense is named."""

import shlex

import pytest

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.declare.compose import Request, read_spec
from support.commands import meshloom

OF_TOOLS = {"WANDB_PROJECT": "theirs", "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "http://user:secret@host",
            "MLFLOW_EXPERIMENT_NAME": "other"}  # fmt: skip


def _spec(*overrides):
    """Reads a declaration anew, as the environment is another one."""
    return read_spec(Request(overrides), then=lambda spec: spec)


def _logged(*overrides):
    options = _spec(*overrides).logging
    return options.wandb.project, options.wandb.mode, options.mlflow.uri, options.mlflow.experiment


def test_a_tools_own_variables_go_before_our_defaults_and_typed_keys_before_both(monkeypatch):
    ours = _logged()
    for name, value in OF_TOOLS.items():
        monkeypatch.setenv(name, value)
    assert _logged() == tuple(OF_TOOLS.values())
    typed = ("wandb.project=a", "wandb.mode=online", "mlflow.uri=b", "mlflow.experiment=c")
    assert _logged(*(f"logging.{word}" for word in typed)) == ("a", "online", "b", "c")
    assert "secret" not in str(_spec().as_written())
    for name in OF_TOOLS:
        monkeypatch.setenv(name, "")
    assert _logged() == ours == ("meshloom", "online", None, "meshloom")


def test_a_variable_with_nonsense_is_named(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "onlin")
    with pytest.raises(ConfigError) as error:
        _spec()
    (problem,) = error.value.problems
    assert problem.where == "logging.wandb.mode (by the variable WANDB_MODE)"
    assert "did you mean 'online'" in problem.fix


def test_a_cache_in_no_place_is_the_default_one(monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/ada")
    for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    assert _spec().compilation_cache == "/home/of/ada/.cache/meshloom/xla"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert _spec().compilation_cache == "/cache/meshloom/xla"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "hdfs://cache")
    with pytest.raises(ConfigError, match="by the variable JAX_COMPILATION_CACHE_DIR"):
        _spec()


def test_a_variable_that_jax_cannot_read_is_one_error():
    done = meshloom("explain", JAX_ENABLE_X64="maybe")
    assert done.returncode == 2
    assert "JAX_ENABLE_X64=maybe" in done.stderr
    assert "Traceback" not in done.stderr


def _fix(*overrides) -> Problem:
    with pytest.raises(ConfigError) as error:
        _spec(*overrides)
    (problem,) = error.value.problems
    return problem


@pytest.mark.parametrize(
    "value", ["lr=1e-3", "it's", '"a', "{x", "50%(x)", "12345", "true", "1e5", "null and void: [a"]
)
def test_the_fix_of_text_in_another_type_is_what_to_type(value):
    """The words of the fix, as a shell takes them, declare the text that was typed."""
    (word,) = shlex.split(_fix(f"run.notes={value}").fix.partition(": ")[2])
    assert _spec(word).run.notes == value


def test_a_variable_as_a_number_is_shown_how_to_be_read(monkeypatch):
    monkeypatch.setenv("N", "7")
    problem = _fix("num_steps=${oc.env:N}")
    (word,) = shlex.split(problem.fix.partition(": ")[2])
    assert _spec(word).num_steps == 7
    monkeypatch.delenv("N")
    problem = _fix("num_steps=${oc.env:N}")
    assert (problem.where, problem.what) == ("num_steps", "the environment variable N is not set")


@pytest.mark.parametrize(
    ("typed", "fix"),
    [("num_steps==10", "write it with one '=': num_steps=10"), ("num_steps", "give it a value: num_steps=..."),
     ("run.notes=a, b", """or text: 'run.notes="a, b"'"""), ("run.tags=[1]", 'quote it: "1"'),
     ("num_steps=1e3", "give a whole number: 1000")],
)  # fmt: skip
def test_a_fix_is_a_word_that_works(typed, fix):
    with pytest.raises(ConfigError) as error:
        read_spec(Request((typed,)), then=lambda spec: spec)
    assert error.value.problems[0].fix.endswith(fix)
