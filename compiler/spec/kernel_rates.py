"""Reads the rates of kernels of attention and grouped matmuls: conf/calibration/_kernels.yaml, or one's own target.

A chip names the attention kernel that its programs are priced with (`chip.attention`), or declares one:

    target.chip.attention=early_pallas_v5p
    target.chip.attention={title: mine, source: my trace, forward: 7.7, backward: 19.3}

forward, backward: of a kernel whose blocks cost the same wherever they lie, what a block costs; of others, shares of
the peak by the size of a head and the length; or one number, the picoseconds of a score that the mask leaves.
"""

import math
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, TypeAdapter

from meshloom.models.record import Record, mistake

from ..core.config_types import Text
from ..core.errors import use_one_of
from ..core.kernels import AttentionCall, RatedBy
from .figure_source import FigureSource
from .measured_tables import with_whole_keys
from .own_config import own_config

Share = Annotated[float, Field(gt=0, le=1)]
ByLength = Annotated[dict[PositiveInt, Share], Field(min_length=1)]
ByHead = Annotated[dict[PositiveInt, ByLength], Field(min_length=1)]
_BY_HEAD: TypeAdapter[dict[int, dict[int, float]]] = TypeAdapter(ByHead)

# Where a call does not say: of our kernels for TPUs, and of the recipes that others publish.
USUAL_BLOCK = 1024


class BlockRate(Record):
    """The cost of a block of queries x keys: its matmuls, and the work of a kernel for each block besides.

    share: of the peak, which the matmuls reach. lost_flops: the FLOPs at the peak for which the rest takes as long, so
    that it belongs to chips with the same balance of units. least_head: the tokens of a matrix unit's side; a smaller
    head takes as long."""

    share: Share
    lost_flops: NonNegativeFloat
    least_head: PositiveInt

    def flops_per_second(self, call: AttentionCall, peak: float) -> float:
        """Returns the rate of a call's arithmetic."""
        block = call.block or min(USUAL_BLOCK, call.length or USUAL_BLOCK)
        as_long = self.lost_flops + self.matmul_flops(call.matmuls, call.head_dim) * block**2
        return peak * 2 * call.matmuls * call.head_dim * block**2 / as_long

    def matmul_flops(self, matmuls: int, head_dim: int) -> float:
        """Returns the FLOPs at the peak for which the matmuls of a score take as long."""
        return 2 * matmuls * max(head_dim, self.least_head) / self.share


def _rate_of_pass(value: Any) -> Any:
    """Raises one error, where a union would raise one for each of its types."""
    if isinstance(value, Mapping):
        by_length = (row for row in value.values() if isinstance(row, Mapping))
        if any(isinstance(each, Mapping) for row in by_length for each in row.values()):
            fix = "give shares by head and length, {128: {2048: 0.49}}; blocks have {share, lost_flops, least_head}"
            raise mistake("this table of shares has three levels", fix)
        is_of_blocks = any(isinstance(key, str) and not key.isdecimal() for key in value)
        return BlockRate.model_validate(value) if is_of_blocks else _BY_HEAD.validate_python(with_whole_keys(value))
    if isinstance(value, BlockRate) or (isinstance(value, int | float) and value > 0):
        return value
    fix = "give {share: 0.95, lost_flops: 2.1e8, least_head: 128}, shares by head and length, {128: {2048: 0.49}}, "
    fix += "or picoseconds for a score"
    raise mistake(f"{value!r} is neither what a block costs, nor a table of shares, nor a time", fix)


PassRate = Annotated[BlockRate | ByHead | PositiveFloat, BeforeValidator(_rate_of_pass)]


class AttentionKernel(Record):
    """An attention kernel, as far as its time depends on it. title: what it is, in words; source: where it was
    measured. forward, backward: what each pass reaches; of two backward kernels, each."""

    title: Text
    source: FigureSource
    forward: PassRate
    backward: PassRate

    def __hash__(self) -> int:
        return hash((self.title, self.source))

    def flops_per_second(self, call: AttentionCall, peak: float) -> float:
        """Returns the rate of a call's arithmetic. peak: of the device; a rate in picoseconds does not depend on it."""
        rate = self.backward if call.is_backward else self.forward
        if isinstance(rate, BlockRate):
            return rate.flops_per_second(call, peak)
        if isinstance(rate, Mapping):
            by_head = {head: _at_length(lengths, call.length) for head, lengths in rate.items()}
            return peak * share_of_head(by_head, call.head_dim)
        return 2 * matmuls_of_pass(call.matmuls) * call.head_dim / (rate * 1e-12)

    def lost_scores(self, head_dim: int) -> float | None:
        """Returns the scores that take as long as what a block costs besides its own, in a forward pass and one
        backward kernel; None where blocks have no price."""
        if not (isinstance(self.forward, BlockRate) and isinstance(self.backward, BlockRate)):
            return None
        of_score = self.forward.matmul_flops(2, head_dim) + self.backward.matmul_flops(5, head_dim)
        return (self.forward.lost_flops + self.backward.lost_flops) / of_score


def matmuls_of_pass(matmuls: int) -> int:
    """Returns the matmuls of the pass that a kernel of so many is a part of: two backward kernels have 3 and 4."""
    return 7 if matmuls in (3, 4) else matmuls


def _at_length(shares: ByLength, length: int) -> float:
    """Returns the share at a length. Between two that were measured it is a line over the logarithm of the length;
    beyond them, and where the length is not known, it is that of the nearest, and of the longest."""
    known = sorted(shares)
    if not length or length >= known[-1]:
        return shares[known[-1]]
    for low, high in pairwise(known):
        if low <= length:
            far = math.log(length / low) / math.log(high / low)
            if far <= 1:
                return shares[low] + (shares[high] - shares[low]) * far
    return shares[known[0]]


def share_of_head(shares: Mapping[int, float], size: int) -> float:
    """Returns the share of the peak that attention with heads of this size reaches. Between two sizes that are known,
    what a score takes is a line: its matmuls, and its part of the softmax. A smaller head takes as long as the smallest
    that is known."""
    known = sorted(shares)
    if size <= known[0]:
        return shares[known[0]] * size / known[0]
    if size >= known[-1]:
        return shares[known[-1]]
    low, high = max(each for each in known if each <= size), min(each for each in known if each >= size)
    if low == high:
        return shares[low]
    at_low, at_high = low / shares[low], high / shares[high]
    return size / (at_low + (at_high - at_low) * (size - low) / (high - low))


class GroupedKernel(Record):
    """A kernel of grouped matmuls. share: of the peak, over the rows of all tiles that it computes. row_tiles: by chip,
    the rows of a tile that it may have, and the time of a matmul over that with the largest."""

    share: Share
    source: FigureSource
    row_tiles: Mapping[str, Annotated[dict[PositiveInt, PositiveFloat], Field(min_length=1)]] = {}


@cache
def grouped_kernels() -> Mapping[str, GroupedKernel]:
    """Returns the kernels of grouped matmuls by name."""
    found = own_config("calibration/_kernels.yaml")["grouped"]
    return {name: GroupedKernel.model_validate(each) for name, each in found.items()}


def kernel_flops_per_second(of: RatedBy, peak: float, attention: AttentionKernel | None) -> float:
    """Returns the rate of a kernel's arithmetic by itself, for estimates and for compiled programs. peak: of the
    device; attention: the kernel of its chip, None: at the peak."""
    if isinstance(of, AttentionCall):
        return peak if attention is None else attention.flops_per_second(of, peak)
    return peak * grouped_kernels()[of].share


@cache
def attention_kernels() -> Mapping[str, AttentionKernel]:
    """Returns the attention kernels of conf/calibration/_kernels.yaml by name."""
    found = own_config("calibration/_kernels.yaml")["attention"]
    return {name: AttentionKernel.model_validate(each) for name, each in found.items()}


def _named(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if (found := attention_kernels().get(value)) is None:
        known = list(attention_kernels())
        raise mistake(f"there is no attention kernel '{value}'", f"{use_one_of(value, known)}, or declare one")
    return found


NamedAttention = Annotated[AttentionKernel, BeforeValidator(_named)]
