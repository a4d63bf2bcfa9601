"""Every kind of declaration passes that is right, and code of a user is checked like ours."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from conftest import LINEAR_STACK, plan_of, pointwise_plan, spec_of
from meshloom.compiler.driver import plan_run
from meshloom.compiler.parallel.operation import Cost, Lowered, OpInputs, OpPlan, ParallelOp, Strategy
from meshloom.compiler.parallel.registry import OPERATIONS
from meshloom.compiler.sharding.arrays import OpSite
from meshloom.models import Context, Model, Params
from meshloom.runtime.check import check as lines
from meshloom.runtime.check.check import DeclarationCheck
from meshloom.runtime.check.check_files import transformers_logits
from meshloom.runtime.check.programs import Compiler
from meshloom.runtime.check.runs import ONE_DEVICE
from meshloom.runtime.weights.folder import SINGLE
from support.programs import plan_as_declared
from support.published import write_published

pytestmark = pytest.mark.ci
FSDP = ("target=cpu-2", "sharding=fsdp")
PLANS = {
    "stages": lambda: plan_of("target=cpu-2", "mesh.fsdp=1", "mesh.stage=2", "num_microbatches=2"),
    "adapter": lambda: plan_of(*FSDP, "adapter=lora"),
    "adapter over four bits": lambda: plan_of(*FSDP, "adapter=qlora", "adapter.base.block=8"),
    "pairs": lambda: plan_of(
        *FSDP, "objective=dpo", "data=preferences", "data.source.paths=[pairs.jsonl]", "data/tokenizer=bytes"
    ),
    "a model of the user": lambda: pointwise_plan(*FSDP),
}


def _failed(plan) -> dict[str, str]:
    check = DeclarationCheck(plan, "a test")
    with Compiler() as compiler:
        check.start(compiler)
        return {line.name: line.why for line in check.of_step() if line.status == "failed"}


@pytest.mark.parametrize("kind", PLANS)
def test_a_declaration_of_each_kind_passes(kind):
    assert not _failed(PLANS[kind]())


class Scaling(ParallelOp):
    """An operation of the user: 2 x, by itself or by a strategy of its own."""

    kind, title, names, fallback = "scaling", "scaling", ("itself", "own"), "itself"

    def __init__(self, factor: float):
        self.factor = factor

    def strategies(self, site: OpSite, inputs: OpInputs) -> Sequence[Strategy]:
        del site, inputs
        own = Strategy("own", "by a factor", cost=Cost(1.0, "seconds"), reason="1 s")
        return own, Strategy("itself", "by two", cost=Cost(2.0, "seconds"), reason="2 s")

    def lower(self, plan: OpPlan) -> Lowered | None:
        return (lambda x: self.factor * x) if plan.chosen.name == "own" else None


def _with_scaling(model: Model) -> Model:
    (stack,) = model.stacks

    def apply(params: Params, x: jax.Array, context: Context) -> jax.Array:
        return stack.layer.apply(params, context.operation("scaling", "layer", lambda x: 2 * x, x), context)

    return replace(model, stacks=(replace(stack, layer=replace(stack.layer, apply=apply)),))


def test_a_strategy_of_the_user_is_compared_with_what_the_model_says(monkeypatch):
    spec = spec_of(*FSDP, *LINEAR_STACK)
    build = type(spec.model).build
    monkeypatch.setattr(type(spec.model), "build", lambda self: _with_scaling(build(self)))
    assert not _failed(plan_run(spec, (*OPERATIONS, Scaling(2.0))))
    assert {"loss", "gradients", "update"} <= set(_failed(plan_run(spec, (*OPERATIONS, Scaling(2.01)))))


@pytest.mark.peers
def test_weights_that_are_read_wrongly_have_other_logits_than_the_folder(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="pip install -e '.[peers]'")
    write_published(tmp_path, plan_of().spec.model, dtype="float32")
    check = DeclarationCheck(plan_as_declared("target=cpu-1", "model=from_hf", f"model.path={tmp_path}"), "a test")
    with Compiler() as compiler:
        check.start(compiler)
        assert check.variants["meshes"] == ONE_DEVICE
        found = check.weights()
        assert (found.status, found.name) == ("passed", "weights"), found
        assert found.measured is not None
        tensors = load_file(tmp_path / SINGLE)
        changed = tmp_path / "changed"
        changed.mkdir()
        (changed / "config.json").write_text((tmp_path / "config.json").read_text())
        save_file({k: x * np.float32(1.01 if "q_proj" in k else 1) for k, x in tensors.items()}, changed / SINGLE, {"format": "pt"})  # fmt: skip  # noqa: E501
        monkeypatch.setattr(lines, "transformers_logits", lambda _, tokens: transformers_logits(changed, tokens))
        assert check.weights().status == "failed"
