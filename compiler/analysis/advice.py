"""Advice of findings, each with a test of whether a plan already follows it; advice that is followed is not given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core.collectives import CollectiveKind
from ..core.format import human_seconds
from ..plan import Plan
from ..schema import CollectiveReport, total
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
    lambda plan: any(each.chosen.weights == "chunked" for each in plan.operations),
)
MORE_TOKENS = "give each device more tokens: a larger global_batch_size, for which it takes no longer"
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


def reduced_in_bfloat16(collectives: Sequence[CollectiveReport]) -> Advice:
    """Returns the advice to reduce gradients in bfloat16, with the exposed time that half the bytes would save at most.
    collectives: of the compiled program."""
    wide = [each for each in collectives if each.dtype == "f32" and each.kind in ("all-reduce", "reduce-scatter")]
    exposed = total(each.exposed_seconds for each in wide)
    saved = f", and up to {human_seconds(exposed / 2)} a step" if exposed else ""
    return Advice(
        f"reduce gradients in bfloat16, which saves half the bytes{saved}: precision.gradient_reduction=bfloat16",
        lambda plan: plan.spec.precision.compute != "bfloat16" or plan.spec.precision.gradient_reduction != "float32",
    )


def unfollowed(plan: Plan, *advice: Advice | str) -> str:
    """Returns the advice that is not followed yet, joined by "or". A plain text is always given."""
    return ", or ".join(
        each if isinstance(each, str) else each.text
        for each in advice
        if isinstance(each, str) or not each.is_followed(plan)
    )
