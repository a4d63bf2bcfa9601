"""Advice of findings, each with a test of whether a plan already follows it; advice that is followed is not given."""

from collections.abc import Callable
from dataclasses import dataclass

from ..core.collectives import CollectiveKind
from ..parallel.lm_head import VOCAB_CHUNKS
from ..plan import Plan
from ..target.compiler_options import hidden_kinds, presets_for


@dataclass(frozen=True)
class Advice:
    """One piece of advice. text: what to do, with its override. is_followed: whether a plan already does it."""

    text: str
    is_followed: Callable[[Plan], bool]


SPLIT_THE_GROUP = Advice("split the group: sharding=hsdp", lambda plan: plan.mesh.sizes["replica"] > 1)
SPLIT_OVER_TENSOR = Advice("split it more: sharding=fsdp_tensor", lambda plan: plan.mesh.sizes["tensor"] > 1)
WIDER_TENSOR = Advice("split it more: a larger mesh.tensor", lambda plan: plan.mesh.sizes["tensor"] == 1)
HEAD_IN_CHUNKS = Advice(
    "cut the vocabulary: parallel.lm_head=vocab_chunks",
    lambda plan: plan.operation("lm_head").chosen.name == VOCAB_CHUNKS,
)
FULL_REMAT = Advice("remat=full", lambda plan: plan.spec.remat.policy == "full")


def with_preset_for(plan: Plan, kind: CollectiveKind) -> Advice | None:
    """Returns the advice to take the flag preset of the target that runs collectives of weights of this kind beside
    compute. None if there is none."""
    tried = ((name, one) for name, one in presets_for(plan.target).items() if "weights" in one.tried_for)
    name = next((name for name, one in tried if kind in one.hides), None)
    if name is None:
        return None
    return Advice(
        f"set overlap.flag_presets=[{name}], with which {kind}s of most shapes stay what they are",
        lambda plan: kind in hidden_kinds(plan.spec.overlap.flag_presets, "weights", plan.target),
    )


def unfollowed(plan: Plan, *advice: Advice | str) -> str:
    """Returns the advice that is not followed yet, joined by "or". A plain text is always given."""
    return ", or ".join(
        each if isinstance(each, str) else each.text
        for each in advice
        if isinstance(each, str) or not each.is_followed(plan)
    )
