"""Reads the rates of kernels of attention and grouped matmuls: conf/calibration/_kernels.yaml, or one's own target.

A chip names the attention kernel that its programs are priced with (`chip.attention`), or declares one:

    target.chip.attention=early_pallas_v5p
    target.chip.attention={title: mine, source: my trace, forward: 7.7, backward: 19.3}

forward, backward: shares of the peak, by the size of a head, the tokens of a block, and the tokens that a query may
see; or one number, the picoseconds of a score that the mask leaves.
"""

import math
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from meshloom.models.record import Record, mistake

from ..core.config_types import Text
from ..core.errors import use_one_of
from ..core.kernels import AttentionCall
from .measured_tables import with_whole_keys
from .own_config import own_config

Share = Annotated[float, Field(gt=0, le=1)]
ByLength = Annotated[dict[PositiveInt, Share], Field(min_length=1)]
ByBlock = Annotated[dict[PositiveInt, ByLength], Field(min_length=1)]
ByHead = Annotated[dict[PositiveInt, ByBlock], Field(min_length=1)]


def _by_head_or_picoseconds(value: Any) -> Any:
    """Raises one error, where a union would raise one for each of its types."""
    if isinstance(value, Mapping):
        return with_whole_keys(value)
    if isinstance(value, int | float) and value > 0:
        return value
    fix = "give shares by head, block and length, {128: {512: {2048: 0.38}}}, or picoseconds for a score"
    raise mistake(f"{value!r} is neither a table of shares nor a time", fix)


PassRate = Annotated[ByHead | PositiveFloat, BeforeValidator(_by_head_or_picoseconds)]


class AttentionKernel(Record):
    """An attention kernel, as far as its time depends on it. title: what it is, in words; source: where it was
    measured. forward, backward: what each pass reaches."""

    title: Text
    source: Text
    forward: PassRate
    backward: PassRate

    def __hash__(self) -> int:
        return hash((self.title, self.source))

    def flops_per_second(self, call: AttentionCall, peak: float) -> float:
        """Returns the rate of a call's arithmetic. peak: of the device; a rate in picoseconds does not depend on it."""
        rate = self.backward if call.is_backward else self.forward
        if isinstance(rate, Mapping):
            by_head = {
                head: _at_length(_nearest(blocks, call.block), call.length) for head, blocks in sorted(rate.items())
            }
            return peak * share_of_head(by_head, call.head_dim)
        return 2 * matmuls_of_pass(call.matmuls) * call.head_dim / (rate * 1e-12)


def matmuls_of_pass(matmuls: int) -> int:
    """Returns the matmuls of the pass that a kernel of so many is a part of: two backward kernels have 3 and 4."""
    return 7 if matmuls in (3, 4) else matmuls


def _nearest(blocks: Mapping[int, ByLength], block: int) -> ByLength:
    """Returns the shares of the block that is nearest in size; of the smallest where the call's is not known."""
    return blocks[min(sorted(blocks), key=lambda each: abs(math.log(each / (block or min(blocks)))))]


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
    """A kernel of grouped matmuls. share: of the peak, over the rows of all tiles that it computes."""

    share: Share
    source: Text


@cache
def grouped_kernels() -> Mapping[str, GroupedKernel]:
    """Returns the kernels of grouped matmuls by name."""
    found = own_config("calibration/_kernels.yaml")["grouped"]
    return {name: GroupedKernel.model_validate(each) for name, each in found.items()}


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
