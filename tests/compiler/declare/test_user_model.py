"""A model from outside: its longest sequence is held to, and each way to write it wrongly is one error that says so."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import LINEAR_STACK, SMALL
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.user_code import code_allowed_from
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.plan import Plan
from meshloom.runtime.cli import main as cli
from support.commands import run_in_process

MODEL = """
import sys
import jax, jax.numpy as jnp
from flax import nnx
from pydantic import PositiveInt
from meshloom.models import Model, ModelConfig, Stack, build_piece

class Mine(ModelConfig):
    embed_dim: PositiveInt
    num_layers: PositiveInt

    def build(self):
        return Model(
            embed=build_piece(lambda rngs: Embed(self, rngs)),
            stacks=(Stack("layers", build_piece(lambda rngs: Layer(self, rngs)), self.num_layers),),
            head=build_piece(lambda rngs: Head(self, rngs)),
            max_length=16,
        )

class Embed(nnx.Module):
    def __init__(self, config, rngs):
        self.table = nnx.Param(jnp.zeros((config.vocab_size, config.embed_dim)), out_sharding=("vocab", "embed"))
        self.positions = nnx.Param(jnp.zeros((16, config.embed_dim)), out_sharding=(None, "embed"))

    def __call__(self, tokens, context):
        x = self.table[tokens] + self.positions[...][: tokens.shape[1]]
        return context.activation("embedded", x, "batch", "length", "embed")

class Layer(nnx.Module):
    def __init__(self, config, rngs):
        self.kernel = nnx.Param(jnp.zeros((config.embed_dim, config.embed_dim)), out_sharding=("embed", "mlp"))

    def __call__(self, x, context):
        return context.activation("residual", x @ self.kernel[...], "batch", "length", "embed")

class Head(nnx.Module):
    def __init__(self, config, rngs):
        self.kernel = nnx.Param(jnp.zeros((config.embed_dim, config.vocab_size)), out_sharding=("embed", "vocab"))

    def __call__(self, x, context):
        return context.activation("logits", x @ self.kernel[...], "batch", "length", "vocab")
"""
LAYER = '"residual", x @ self.kernel[...], "batch", "length", "embed"'
Plans = Callable[..., Plan]


@pytest.fixture
def plan_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plans]:
    """(text, its replacement, overrides) -> the plan of a small run with the model changed so."""
    monkeypatch.chdir(tmp_path)

    def plan(old: str = "", new: str = "", *overrides: str) -> Plan:
        assert MODEL.count(old) >= 1
        Path("their_models.py").write_text(MODEL.replace(old, new, 1) if old else MODEL)
        declared = (*SMALL, *LINEAR_STACK, "model.family=their_models:Mine", *overrides)
        with code_allowed_from(["their_models"]):
            return read_spec(Request(declared), then=plan_run)

    yield plan
    sys.modules.pop("their_models", None)


def problems_of(plan_with: Plans, old: str, new: str, *overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as error:
        plan_with(old, new, *overrides)
    return error.value.problems


def test_a_model_from_outside_declares_its_longest_sequence(plan_with):
    assert plan_with("", "", "sequence_length=16").model.max_length == 16
    sys.modules.pop("their_models")
    (problem,) = problems_of(plan_with, "", "", "sequence_length=17")
    assert problem == Problem("sequence_length", "17 tokens are more than the model's maximum of 16", "use 16 or less")


WRONG = {
    "a call without the context": (
        'def __call__(self, x, context):\n        return context.activation("residual"',
        'def __call__(self, x):\n        return ("residual"',
        "Layer has __call__(self, x), and the compiler calls it as __call__(self, x, context)",
    ),
    "a call that wants more": (
        "def __call__(self, tokens, context):",
        "def __call__(self, tokens, context, mask):",
        "Embed has __call__(self, tokens, context, mask), and the compiler calls it as __call__(self, x, context)",
    ),
    "no call": ("def __call__(self, tokens", "def forward(self, tokens", "Embed has no __call__"),
    "no module": ("Head(self, rngs)", "3", "int is not an nnx.Module"),
    "no model": ("return Model(", "Model(", "build() returned None, not a Model"),
    "a layer that returns nothing": (f"return context.activation({LAYER})", "pass", "Layer.__call__ returned None"),
    "a layer that returns two things": (
        f"context.activation({LAYER})", "x, x",
        "Layer.__call__ returned a tuple of 2",
    ),
    "a layer of another width": (
        f"context.activation({LAYER})",
        "x[..., :3]",
        "Layer.__call__ returned an array of shape (16, 16, 3) and type float32",
    ),
    "a layer of another type": (f"context.activation({LAYER})", "x.astype('bfloat16')", "and type bfloat16"),
    "an embedding of other tokens": (
        '"embedded", x, "batch", "length", "embed"',
        '"embedded", x[:, 1:], "batch", "length", "embed"',
        "Embed.__call__ returned an array of shape (16, 15, 32)",
    ),
    "an embedding that is flat": (
        'context.activation("embedded", x, "batch", "length", "embed")',
        "x.sum(-1)",
        "Embed.__call__ returned an array of shape (16, 16)",
    ),
    "a head of too few logits": (
        'context.activation("logits", x @ self.kernel[...], "batch", "length", "vocab")',
        "(x @ self.kernel[...])[..., :9]",
        "Head.__call__ returned an array of shape (16, 16, 9)",
    ),
    "too few names of dimensions": (
        LAYER,
        LAYER.removesuffix(', "embed"'),
        "needs 3 logical axes, has ('batch', 'length')",
    ),
    "no layers": ("self.num_layers),)", "0),)", "stack 'layers' has 0 layers"),
    "one stack and no tuple": ("self.num_layers),)", "self.num_layers))", "stacks are an object of Stack"),
    "a stack named as another part": ('Stack("layers"', 'Stack("head"', "stacks are named head"),
    "a shared parameter that is not there": ("max_length=16", "tied={'kernel': 'tabel'}", "tied names 'tabel'"),
    "a longest sequence that is no number": ("max_length=16", "max_length='16'", "max_length is '16'"),
    "an exception of theirs": (
        "x = self.table",
        "raise KeyError('gate'); x = self.table",
        "tracing their_models:Mine failed: KeyError: 'gate'",
    ),
    "an exit while it is traced": (
        "x = self.table",
        "sys.exit(0); x = self.table",
        "tracing their_models:Mine called sys.exit(0)",
    ),
    "an exit while it is built": (
        "return Model(",
        "sys.exit(); return Model(",
        "building their_models:Mine called sys.exit()",
    ),
    "an exit while it is imported": (
        "import sys",
        "import sys; sys.exit(0)",
        "importing their_models called sys.exit(0)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_model_is_one_error_that_says_what_is_wrong(plan_with, case):
    old, new, told = WRONG[case]
    (problem,) = problems_of(plan_with, old, new)
    assert problem.where == "model.family"
    assert told in problem.what
    assert problem.fix
    if "failed" in problem.what or "sys.exit" in problem.what:
        assert "\n    their_models.py:" in problem.what, "their own line is shown"
    assert "meshloom/" not in problem.what
    assert "Traceback" not in problem.what


def test_an_exit_in_any_other_code_is_no_success(monkeypatch, capsys):
    """Wherever it is: what runs a command is asked for its code, and has none to give."""
    monkeypatch.setattr(cli, "run", lambda args: sys.exit(0))
    monkeypatch.setattr(cli, "hear_interrupts", lambda: None)  # this process stays that of the tests
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert "sys.exit(0) ended the command" in capsys.readouterr().err


def test_explain_of_a_model_that_exits_is_an_error(plan_with, tmp_path):
    plan_with()
    sys.modules.pop("their_models")
    (tmp_path / "their_models.py").write_text("import sys\nsys.exit(0)\n")
    done = run_in_process("explain", "--allow-code-from=their_models", "model.family=their_models:Mine", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(
        "error: model.family: importing their_models called sys.exit(0)\n    their_models.py:2: "
    )
