"""Traits of XLA's compiler for a target that no option changes; read from conf/overlap/_compiler_traits.yaml."""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic import Field

from meshloom.models.record import Record

from ..core.config_types import CompilerOption
from .figure_source import FigureSource
from .own_config import own_config


class ExpectedAcross(Record):
    """How long a scheduler expects a collective across nodes to last: a ring through all devices, of which those of a
    node send at once. bytes_per_second: of a device's NIC. step_seconds: of each step of the ring. sums: how many times
    longer it expects a reduction to last."""

    bytes_per_second: float
    step_seconds: float
    sums: float


class ExpectedKernels(Record):
    """How many kernels a scheduler expects a collective to last, of any size. sums: one with a reduction."""

    moves: int
    sums: int


class ExposedInTurns(Record):
    """The share of tensor parallelism's collectives that is waited for where the parts of a split batch run in turns.
    one_at_a_time: where one collective is on its way at a time, and weights cross nodes, too."""

    share: float
    one_at_a_time: float


class CombinedSums(Record):
    """The limit up to which reduce-scatters are combined into one. most_bytes: of the sums before they are scattered.
    option: the compiler's, which takes the bytes that each device keeps of them."""

    option: str
    most_bytes: int


class CompilerTraits(Record):
    """Traits of the compiler for one target. The defaults describe an unknown compiler.

    synchronous_collectives: every collective is waited for, whatever the options, so a redundant one costs its time.
    unordered_collectives: devices may run independent collectives in different orders, and deadlock.
    all_reduces_each_matmul: the partial results of each matmul are all-reduced separately; otherwise several are
        combined, in shards.
    fuses_into_matmuls: pointwise operations whose result only matmuls read are computed inside of these.
    fuses_after_matmuls: a chain of pointwise operations that alone reads a matmul's result is computed with it.
    fuses_gathers: a gather of rows is computed inside of the pointwise operations that read it.
    exposed_second_sums: share of the time of a gradient's all-reduce that a trip of a loop waits for, where it follows
        a reduce-scatter of the same gradient: what is left to compute then ends before it.
    expected_across: given where the scheduler places what a trip of a loop sends in order, from the end of the trip
        (estimate/latency_hiding.py); None where compute hides what its own loop sends in any order.
    expected_kernels: given where this scheduler counts kernels; None where it expects seconds.
    begins_as_ready: the scheduler lets a collective of a weight begin as soon as it may (estimate/latency_hiding.py),
        and a copy to the host end in the next trip of its loop.
    async_permutes: permutes overlap with independent work, on up to max_chips_async_permutes chips.
    orders_by_barriers: it schedules no operation before an optimization barrier that its operands pass.
    exposed_in_turns: share of tensor parallelism's collectives that is waited for where the parts of a split batch run
        in turns (step/turns.py); None: parts do not run so, or it is not known.
    exposed_inputs: share of an exchange of tokens that is waited for although it needs only the input of its layer: the
        scheduler begins it right before the experts.
    exposed_returns: share of the return of tokens' gradients that is waited for although the gradients of experts'
        matrices do not need it; None: it is not known, and as that of results.
    chunks_wait_across: an exchange of one chunk of tokens over several nodes runs beside no matmul of another.
    copies_loop_carry: the state that a loop carries to its next iteration is copied.
    copies_for_collectives: what a collective sends and receives is copied besides, a pass over memory; otherwise only a
        gathered activation whose parts lie apart is put in order.
    copies_conditionals: what a conditional takes and gives is copied, whichever branch runs.
    gathers_before_loops: a gather issued before a loop ends before the loop starts.
    aborts_on_unroll: the process aborts if an iteration has several layers and a mesh axis splits matmuls.
    scattered_block: the largest block of chips, less than all of them, over which a reduce-scatter stays one although
        the compiler does not run it beside compute; over more it becomes an all-reduce. Empty: none.
    max_reduce_scatter: the largest number of devices, times the odd factor of a dimension that is not scattered, for
        which a reduce-scatter is compiled as one; above it, it becomes an all-reduce. None: no limit.
    memory_options: options with which the compiler plans for all of the memory that a program gets, where that is the
        memory of a chip. Above its own limit it recomputes, and orders operations for memory instead of for overlap.
    combined_sums: the limit up to which reduce-scatters are combined; None: the compiler's own.
    narrow_reduction_options: the compiler fails without these options on a loop over microbatches that reduces
        gradients in a narrower type than it accumulates them in.
    streams_from_host: slices of an array in the host's memory are copied beside compute, and written in place.
    tile_rows: matrices lie in tiles of this many rows; shards of a row dimension that are not whole tiles are padded
        for a collective, which is then synchronous. 1: they are not.
    ragged_all_to_all: it compiles ragged all-to-alls, on up to max_chips_ragged_all_to_all chips.
    ragged_hides_less: with one in a loop it hides fewer other collectives, and the step is longer.
    sources: where numbers among these are from, and what of them is assumed.
    """

    synchronous_collectives: bool = False
    unordered_collectives: bool = False
    all_reduces_each_matmul: bool = False
    fuses_into_matmuls: bool = False
    fuses_after_matmuls: bool = True
    fuses_gathers: bool = False
    exposed_second_sums: float = 0.0
    expected_across: ExpectedAcross | None = None
    expected_kernels: ExpectedKernels | None = None
    begins_as_ready: bool = False
    async_permutes: bool = False
    max_chips_async_permutes: int | None = None
    orders_by_barriers: bool = False
    exposed_in_turns: ExposedInTurns | None = None
    exposed_inputs: float = 0.0
    exposed_returns: float | None = None
    chunks_wait_across: bool = False
    copies_loop_carry: bool = False
    copies_for_collectives: bool = False
    copies_conditionals: bool = False
    gathers_before_loops: bool = False
    aborts_on_unroll: bool = False
    scattered_block: tuple[int, ...] = ()
    max_reduce_scatter: int | None = None
    memory_options: Mapping[str, int] = Field(default_factory=dict)
    combined_sums: CombinedSums | None = None
    narrow_reduction_options: Mapping[str, CompilerOption] = Field(default_factory=dict)
    streams_from_host: bool = False
    tile_rows: int = 1
    ragged_all_to_all: bool = False
    max_chips_ragged_all_to_all: int | None = None
    ragged_hides_less: bool = False
    sources: Mapping[str, FigureSource] = Field(default_factory=dict)

    def all_reduces(self, num_devices: int, others: Iterable[int]) -> bool:
        """Returns True if a reduce-scatter over this many devices becomes an all-reduce. others: the sizes of the
        dimensions that are not scattered."""
        limit = self.max_reduce_scatter
        return limit is not None and num_devices * max(map(odd_part, others), default=1) > limit

    def max_odd_factor(self, num_devices: int) -> int | None:
        """Returns the largest odd factor that a dimension may have where this many devices reduce-scatter another;
        None: no limit, or no valid factor."""
        return self.max_reduce_scatter // num_devices or None if self.max_reduce_scatter else None


def odd_part(size: int) -> int:
    """Returns the largest odd divisor: 128,256 = 501 x 256 -> 501."""
    return size // (size & -size)


def read_compiler_traits(platform: str, chip: str | None) -> CompilerTraits:
    """Returns the traits of the compiler for a chip of a platform. chip None: any device of the platform."""
    table = traits_by_name()
    found = [table[name] for name in (platform, chip) if name in table]
    return CompilerTraits.model_validate_json(json.dumps({key: value for one in found for key, value in one.items()}))


@cache
def traits_by_name() -> dict[str, dict[str, Any]]:
    """Returns the file's contents: the known traits of the compiler, by platform and by chip."""
    return own_config("overlap/_compiler_traits.yaml")
