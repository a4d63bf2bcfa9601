"""The loop over layers and the flag presets that an estimate rests on where the declaration leaves them to a search."""

from dataclasses import dataclass

from ..config.overlap_spec import OverlapSpec
from ..plan import Plan
from ..sharding.batch import sequences_of_device
from ..target.compiler_options import assumed_weight_presets, presets_for, why_permutes_wait
from ..target.target import TargetPlan

BATCH_SPLIT = 2  # what the searches of docs/overlap_results.md chose wherever axes split matmuls


@dataclass(frozen=True)
class AssumedOverlap:
    """How an estimate takes the layers to be run. batch_split: parts of a device's sequences that are interleaved in a
    layer."""

    batch_split: int
    flag_presets: tuple[str, ...]

    def overrides(self, declared: OverlapSpec) -> tuple[str, ...]:
        """Returns the overrides that compile it and search for nothing; none if nothing was to be searched."""
        if declared.search is None:
            return ()
        split = f"overlap.layers.batch_split={self.batch_split}"
        presets = f"overlap.flag_presets=[{','.join(self.flag_presets)}]"
        return (*([split] if self.batch_split != declared.layers.batch_split else []), "overlap.search=null", presets)


def assume_overlap(plan: Plan) -> AssumedOverlap:
    """Returns what the declaration says, or what a search is taken to find: the flag preset that hides most, and a
    batch split where tensor parallelism's collectives can then run beside matmuls."""
    overlap, target = plan.spec.overlap, plan.target
    if overlap.search is None:
        return AssumedOverlap(overlap.layers.batch_split, overlap.flag_presets)
    presets = assumed_weight_presets(overlap.flag_presets, target)
    if not plan.auto_axes or not can_split_batch(sequences_of_device(plan.spec, plan.mesh), target):
        return AssumedOverlap(overlap.layers.batch_split, presets)
    of_activations = [name for name, one in presets_for(target).items() if "activations" in one.tried_for]
    return AssumedOverlap(max(BATCH_SPLIT, overlap.layers.batch_split), (*presets, *of_activations[:1]))


def can_split_batch(num_sequences: int, target: TargetPlan) -> bool:
    """Returns True if one half of a device's sequences can compute while the activations of the other are sent.
    num_sequences: of one microbatch on a device."""
    return num_sequences % BATCH_SPLIT == 0 and why_permutes_wait(target) is None
