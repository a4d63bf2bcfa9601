"""Lays out one array: the mesh axes of each dimension and why, or the dimensions that no rule could take.

    array  layers/attention/query_EHD (4, 128, 8, 16), axes (layers, embed, heads, head_dim)
    rules  [0] embed -> fsdp   [1] heads -> tensor   [2] layers, head_dim -> replicated
    mesh   fsdp=4 tensor=2
    ->     P(None, 'fsdp', 'tensor', None)
           layers, head_dim whole by parameters[2]; embed over fsdp by parameters[0]; heads over tensor by parameters[1]

Rules are tried in order; each takes the dimensions that it names and that no earlier rule took. A rule whose mesh axes
are already used in this array, or do not divide the dimension, passes it on to the next rule for that logical axis. If
there is no further rule, the array is refused. A rule may name alternatives, to split instead of a dimension whose
shards the compiler handles badly (docs/sharding.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jax.sharding import PartitionSpec

from meshloom.models.config import divisors

from ..core.errors import Problem
from ..spec.compiler_traits import CompilerTraits
from ..spec.sharding_spec import Rule
from ..target.mesh import MeshPlan, nearest
from .arrays import Array

# The keys that set sizes.
_KEYS = {
    "length": "sequence_length", "sequence_parallel_length": "sequence_length", "experts": "model.num_experts",
}  # fmt: skip
RuleTable = Literal["parameters", "optimizer", "activations"]


@dataclass(frozen=True)
class DimensionPlan:
    """The layout of one dimension. axes: the mesh axes that it is split over. rule: the index of the rule that decided,
    None if none was needed. note: why this rule applied, unless it was the first for the axis."""

    logical: str | None
    size: int
    axes: tuple[str, ...]
    rule: int | None
    note: str = ""


@dataclass(frozen=True)
class ArrayPlan:
    """The layout of one array, and why. table: the table of rules that decided it."""

    array: Array
    table: RuleTable | None
    dimensions: tuple[DimensionPlan, ...]
    bytes_per_device: int

    @property
    def spec(self) -> PartitionSpec:
        """Returns one entry per dimension: None, one mesh axis, or a tuple of several."""
        return PartitionSpec(*(d.axes[0] if len(d.axes) == 1 else d.axes or None for d in self.dimensions))

    @property
    def reason(self) -> str:
        """Returns the reason: 'layers, mlp whole by parameters[1]; embed over fsdp by parameters[0]'."""
        alike: dict[str, list[str]] = {}
        for d in self.dimensions:
            where = f"over {', '.join(d.axes)}" if d.axes else "whole"
            by = f" by {self.table}[{d.rule}]" if d.rule is not None else ""
            alike.setdefault(where + by + (f" ({d.note})" if d.note else ""), []).append(d.logical or "a dimension")
        return "; ".join(f"{', '.join(dict.fromkeys(names))} {why}" for why, names in alike.items())


def resolve(
    array: Array, table: RuleTable, rules: Sequence[Rule], mesh: MeshPlan, compiler: CompilerTraits
) -> ArrayPlan | list["UnsettledDimension"]:
    """Returns the layout of one array as in the module's docstring, or the refusals if there are any."""
    settled: list[DimensionPlan | None] = [
        None if name else DimensionPlan(None, size, (), None)
        for name, size in zip(array.logical_axes, array.shape, strict=True)
    ]
    refusals: dict[int, UnsettledDimension] = {}
    taken: dict[str, int] = {}
    for index, rule in enumerate(rules):
        wanted = tuple(axis for axis in rule.mesh if mesh.sizes[axis] > 1)
        for dimension, (name, size) in enumerate(zip(array.logical_axes, array.shape, strict=True)):
            if settled[dimension] is not None or name not in rule.logical:
                continue
            if rival := next((axis for axis in wanted if axis in taken), None):
                refusals[dimension] = UnsettledDimension(
                    array, table, index, dimension, wanted, rival=(rival, taken[rival])
                )
            elif size % mesh.num_shards(wanted):
                refusals[dimension] = UnsettledDimension(array, table, index, dimension, wanted)
            else:
                note = f"{', '.join(rule.mesh)} being of size 1" if rule.mesh and not wanted else ""
                if dimension in refusals:
                    note = refusals.pop(dimension).why(mesh)
                later = {
                    each for other in rules[index + 1 :] if mesh.num_shards(other.mesh) > 1 for each in other.logical
                }
                free = [
                    place
                    for place, plan in enumerate(settled)
                    if plan is None and place != dimension and array.logical_axes[place] not in later
                ]
                split, why = dimension, ""
                if len(wanted) == 1:  # over several mesh axes it was not measured
                    split, why = split_by(rule, array, dimension, free, mesh.num_shards(wanted), compiler)
                if split != dimension:
                    settled[dimension] = DimensionPlan(name, size, (), index, why)
                    name, size, note = array.logical_axes[split], array.shape[split], f"instead of {name}"
                settled[split] = DimensionPlan(name, size, wanted, index, note)
                taken.update(dict.fromkeys(wanted, split))
    dimensions = tuple(plan for plan in settled if plan is not None)
    if len(dimensions) == len(settled):
        num_bytes = array.bytes_of_shard([mesh.num_shards(plan.axes) for plan in dimensions])
        return ArrayPlan(array, table, dimensions, num_bytes)
    unsettled = [dimension for dimension, plan in enumerate(settled) if plan is None]
    return [refusals.get(dimension) or UnsettledDimension(array, table, None, dimension, ()) for dimension in unsettled]


@dataclass(frozen=True)
class UnsettledDimension:
    """A dimension that no rule could take. rule: the last one that names it, None if there is none. rival: a mesh axis
    and the dimension of this array that already uses it."""

    array: Array
    table: RuleTable
    rule: int | None
    dimension: int
    axes: tuple[str, ...]
    rival: tuple[str, int] | None = None

    @property
    def logical(self) -> str:
        return str(self.array.logical_axes[self.dimension])

    @property
    def kind(self) -> tuple[Any, ...]:
        """Returns a key that is equal for refusals that are reported as one problem."""
        size = self.array.shape[self.dimension]
        rival = self.rival and (self.rival[0], self.array.logical_axes[self.rival[1]])
        return (self.table, self.rule, self.logical, size if not self.rival and self.rule is not None else None, rival)

    def why(self, mesh: MeshPlan) -> str:
        size = self.array.shape[self.dimension]
        if self.rival:
            axis, dimension = self.rival
            return f"{axis} is taken by {self.array.logical_axes[dimension]}"
        return f"{size} is not divisible by {_product(self.axes, mesh)}"

    def problem(self, mesh: MeshPlan, num_others: int) -> Problem:
        others = f" (and {num_others} more)" if num_others else ""
        what = f"'{self.array.path}'{others}, dimension {self.dimension} ({self.logical})"
        whole = f"{{logical: [{self.logical}], mesh: []}}"
        if self.rule is None:
            fix = f"add a rule: {whole} keeps it whole on every device"
            return Problem(f"sharding.{self.table}", f"no rule names '{self.logical}', an axis of {what}", fix)
        key = f"sharding.{self.table}[{self.rule}]"
        size, shards = self.array.shape[self.dimension], mesh.num_shards(self.axes)
        if self.rival:
            axis, rival = self.rival
            fix = f"use another mesh axis for one of them, or add {whole} after it to keep {self.logical} whole"
            rival_name = self.array.logical_axes[rival]
            return Problem(key, f"{what}: mesh axis {axis} is already used by dimension {rival} ({rival_name})", fix)
        below, above = size // shards * shards, (size // shards + 1) * shards
        sizes = f"{above}" if below == 0 else f"{below} or {above}"
        fix = f"make {_KEYS.get(self.logical, self.logical)} {sizes}"
        if len(self.axes) == 1:
            fitting = divisors(math.gcd(size, mesh.num_devices))
            fix += f", or mesh.{self.axes[0]} {nearest(shards, fitting)}"
        fix += f", or add {whole} after it to keep it whole"
        return Problem(key, f"{what} has size {size}, not divisible by {_product(self.axes, mesh)}", fix)


def _product(axes: tuple[str, ...], mesh: MeshPlan) -> str:
    return f"{mesh.num_shards(axes)} shards ({' x '.join(f'{axis}={mesh.sizes[axis]}' for axis in axes)})"


def split_by(
    rule: Rule, array: Array, dimension: int, free: Sequence[int], num_shards: int, compiler: CompilerTraits
) -> tuple[int, str]:
    """Returns the dimension that a rule splits when it takes one, and why if it is another.

    free: the dimensions that no rule has taken. Best is one whose shards the compiler handles well; next, the first of
    the array, which is moved unpadded without a copy (weights.py).
    """
    why = _trouble(array, dimension, num_shards, compiler) if rule.alternatives and num_shards > 1 else ""
    if not why:
        return dimension, ""
    others = [
        place
        for logical in rule.alternatives
        for place in free
        if array.logical_axes[place] == logical and not array.shape[place] % num_shards
    ]
    well = [place for place in others if not _trouble(array, place, num_shards, compiler)]
    best = [*well, *(place for place in others if place == _own_dimensions(array)[0])]
    return (best[0], why) if best else (dimension, "")


def _trouble(array: Array, dimension: int, num_shards: int, compiler: CompilerTraits) -> str:
    """Returns what the compiler would do with shards along a dimension; empty if nothing is wrong with them."""
    own, size = _own_dimensions(array), array.shape[dimension]
    if len(own) == 2 and size % (num_shards * compiler.tile_rows):  # with more dimensions, two others lie in tiles
        return f"shards of {size // num_shards} would be padded"
    # Where the two are not tied, the embedding exchanges rows, and the head is cut (embedding.py, lm_head.py); in
    # layers, an all-reduce is hidden.
    others = [array.shape[place] for place in own if place != dimension]
    if array.is_tied and compiler.all_reduces(num_shards, others):
        return "its gradient would be all-reduced"
    return ""


def _own_dimensions(array: Array) -> list[int]:
    """Returns the dimensions that a layer sees."""
    return [place for place, name in enumerate(array.logical_axes) if name != "layers"]


def rules_as_text(rules: Sequence[Rule]) -> str:
    """Returns the rules that the numbers of a table of arrays refer to: "[0] embed -> fsdp; [1] mlp -> whole"."""

    def told(rule: Rule) -> str:
        others = f" (or {', '.join(rule.alternatives)})" if rule.alternatives else ""
        return f"{', '.join(rule.logical)}{others} -> {', '.join(rule.mesh) or 'whole'}"

    return "; ".join(f"[{index}] {told(rule)}" for index, rule in enumerate(rules))
