"""The ways in which operands of a matmul are written in few bits, and their registry.

A product takes its scales out of the sum, so scales are constant along what is contracted: one for the whole operand,
or one for each entry of the dimensions that are left. Blocks along what is contracted have one each where a chip
multiplies scales with the elements, or in float32 (compiler/parallel/block_scaled.py). A new way is a
`register_operand` of an element format.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..core.float_types import PeakType, ScaleType, peak_name
from .block import BlockFormat, per_channel, per_tensor
from .element import element_formats

ScalesOf = Literal["tensor", "channel", "block"]


@dataclass(frozen=True)
class OperandFormat:
    """How an operand is written. name: as declarations write it. element: the type of its elements (element.py).
    scales: one for all of it, or one for each channel: of all that a sum of products reads; or one for each block of
    that. blocks: how a matrix of (rows, what is summed) is written, if each block has a scale. weight_blocks: how a
    weight is; None: as other matrices."""

    name: str
    element: str
    scales: ScalesOf
    blocks: BlockFormat | None = None
    weight_blocks: BlockFormat | None = None

    @property
    def arithmetic(self) -> PeakType:
        """Returns the type in which a chip multiplies its elements, as the files of chips name it: 'float8'."""
        return peak_name(element_formats()[self.element].dtype)

    @property
    def can_round_at_random(self) -> bool:
        """Returns True where a stochastic rounding is unbiased: for whole numbers, which are equidistant."""
        return self.arithmetic == "int8"

    @property
    def how(self) -> str:
        """Returns the format in words: 'fp8 (float8_e4m3fn, a scale for each tensor)'."""
        element = "" if self.element == self.name else f"{self.element}, "
        length = f" of {self.blocks.block[-1]}" if self.blocks else ""
        of_weights = f", {' x '.join(map(str, self.weight_blocks.block))} of weights" if self.weight_blocks else ""
        shared = ", which share one" if self.has_shared_scale else ""
        return f"{self.name} ({element}a scale for each {self.scales}{length}{shared}{of_weights})"

    @property
    def has_shared_scale(self) -> bool:
        """Returns True where the scales of blocks share one in float32, of the whole operand."""
        return self.blocks is not None and self.blocks.scales_format is not None

    def of_matrix(self, *, is_weight: bool = False) -> BlockFormat:
        """Returns the format of a matrix of (rows, what is summed), of a type with a scale for each block."""
        assert self.blocks is not None, f"{self.name} has no blocks"
        return self.weight_blocks or self.blocks if is_weight else self.blocks

    def of(self, num_dimensions: int, contracted: tuple[int, ...]) -> BlockFormat:
        """Returns the format of an operand with these dimensions contracted."""
        if self.scales == "tensor":
            return per_tensor(self.element, num_dimensions)
        return per_channel(self.element, contracted, num_dimensions)


_OPERANDS: dict[str, OperandFormat] = {}


def register_operand(operand: OperandFormat) -> OperandFormat:
    """Registers a way to write operands under its name."""
    if _OPERANDS.setdefault(operand.name, operand) != operand:
        raise ValueError(f"the operand format {operand.name!r} is registered already")
    return operand


def operand_formats() -> Mapping[str, OperandFormat]:
    """Returns all registered ways by name."""
    return _OPERANDS


register_operand(OperandFormat("fp8", "float8_e4m3fn", "tensor"))  # for weights and activations
register_operand(OperandFormat("fp8_e5m2", "float8_e5m2", "tensor"))  # for gradients: range instead of digits
register_operand(OperandFormat("fp8_rowwise", "float8_e4m3fn", "channel"))  # for all, as torchao's recipe of this name
register_operand(OperandFormat("int8", "int8", "channel"))
MX_BLOCKS = BlockFormat("float8_e4m3fn", (1, 32), "power_of_two")  # OCP Microscaling Formats 1.0, section 5.2
register_operand(OperandFormat("mxfp8", "float8_e4m3fn", "block", MX_BLOCKS))
# Scales of 16 in float8_e4m3fn, which share one in float32: NVIDIA 2025, arXiv:2509.25149, appendix B.
NV_BLOCKS = BlockFormat("float4_e2m1fn", (1, 16), scales_format=per_tensor("float8_e4m3fn"))
register_operand(OperandFormat("nvfp4", "float4_e2m1fn", "block", NV_BLOCKS))


def _in_tiles(name: str, scale: ScaleType) -> OperandFormat:
    """Returns the type of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2): a scale for each token and 128 entries, and
    for each 128 x 128 of a weight."""
    row, tile = (BlockFormat("float8_e4m3fn", block, scale) for block in ((1, 128), (128, 128)))
    return OperandFormat(name, "float8_e4m3fn", "block", row, tile)


register_operand(_in_tiles("fp8_blockwise", "float32"))
register_operand(_in_tiles("fp8_blockwise_ue8m0", "power_of_two_above"))  # as Transformer Engine's Float8BlockScaling
