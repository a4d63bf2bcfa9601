"""Declares targets: simulated devices, attached devices, or a kind of chip and its number.

A chip is a file `conf/target/_NAME.yaml` with a source for each figure. Figures are per chip unless they say otherwise;
a chip may be several JAX devices, and names may count cores. Link bandwidths are one way.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from meshloom.models.config import Config, mistake

from ..core.config_types import NumBytes, Text, UpToOne
from ..core.float_types import PeakType
from ..core.format import counted
from ..core.traffic import PassKind
from .figure_source import FigureSource
from .kernel_rates import NamedAttention
from .measured_tables import (
    LEAST_SHARE,
    MOST_OVER,
    KeyPath,
    NamedCollectives,
    NamedMatmuls,
    refuse,
    shipped_matmuls,
)

ChipShape = tuple[PositiveInt, ...]
SMALL_HEAD = 64  # of attention: with a larger one a score has more FLOPs


class Efficiency(Config):
    """Shares of the peaks that compiled programs reach, over whole steps; what an estimate of time rests on."""

    matmul: UpToOne
    memory: UpToOne


class KernelShares(Config):
    """Shares of the peaks that single large kernels reach, measured; what prices of compiled programs rest on.

    matmul_by_type: of types that reach another share of their own peak. memory: a pass that reads and writes. passes:
    kinds of passes that reach another share.
    """

    matmul: UpToOne
    matmul_by_type: dict[PeakType, UpToOne]
    memory: UpToOne
    passes: dict[PassKind, UpToOne]


class Processor(Config):
    """The facts about a GPU that XLA's compiler and the kernels of libraries need."""

    compute_capability: tuple[int, int]  # major, minor
    num_multiprocessors: PositiveInt
    fpus_per_multiprocessor: PositiveInt
    shared_memory_bytes: NumBytes  # of a multiprocessor
    shared_memory_per_block_bytes: NumBytes  # the most that a block may ask for
    l2_cache_bytes: NumBytes


class HostLink(Config):
    """The link between chips and the memory of their host: bytes per second of each way, shared by so many chips."""

    to_device_bytes_per_second: PositiveFloat
    to_host_bytes_per_second: PositiveFloat
    num_chips: PositiveInt


class ChipSpec(Config):
    name: Text  # what it is called; of your own chip, any name
    known_as: Text  # to compilers and clouds, and in tables of traits: the kind of chip that it is made of
    device_kind: Text  # JAX's name of its devices
    num_cores: PositiveInt  # as counted in the target's name: v5p-128 is 64 chips
    num_devices: PositiveInt  # JAX devices per chip
    peak_flops_per_second: dict[PeakType, PositiveFloat | None]  # dense, by the type of operands; None: not published
    real_types: tuple[PeakType, ...]  # of few bits, in which its compiler makes matmuls faster than in 16 bits; others
    # compile without a word, and gain nothing
    hbm_bytes: NumBytes
    compiler_hbm_bytes: NumBytes  # the part of it that a program may use
    hbm_bytes_per_second: PositiveFloat
    host_bytes: NumBytes | None  # the chip's share of its host's memory; None: hosts differ
    host_link: HostLink
    vector_memory_bytes: NumBytes  # on the chip: a TPU's VMEM, a GPU's shared memory
    clock_hz: PositiveFloat  # clock of the cycles that XLA estimates
    processor: Processor | None  # of a GPU
    power_watts: PositiveFloat | None  # its limit as sold; None: not published
    power_limit_watts: PositiveFloat | None  # that your operator set (nvidia-smi -q -d POWER); None: as sold
    efficiency: Efficiency
    kernels: KernelShares
    attention: NamedAttention  # the kernel that attention is priced with
    matmuls: NamedMatmuls  # measured times; where a type has none, its share of the peak counts
    sustained: UpToOne  # share of a single matmul's rate that a run keeps at the power as sold
    sources: dict[str, FigureSource]  # by figure

    @property
    def cores_per_device(self) -> int:
        """Returns the cores that work as one JAX device."""
        return max(1, self.num_cores // self.num_devices)

    @model_validator(mode="after")
    def _check_attention(self) -> Self:
        """Shares that are taken for picoseconds would be faster than the chip."""
        for name, matmuls in (("forward", 2), ("backward", 5)):
            rate, peak = getattr(self.attention, name), self.peak_flops_per_second["bfloat16"]
            if peak and isinstance(rate, int | float) and 2 * matmuls * SMALL_HEAD / (rate * 1e-12) > peak:
                what = f"{rate:g} ps for a score is above the peak of {self.name}, even with a head of {SMALL_HEAD}"
                raise mistake(what, "give picoseconds, or shares by head and length", f"attention.{name}")
        return self

    @model_validator(mode="after")
    def _check_matmuls(self) -> Self:
        """Matmuls that were measured cannot be faster than the chip, and the best of them are not a thousand times
        slower."""
        wrong = list(self._wrong_rates())
        if wrong and (name := next((name for name, one in shipped_matmuls().items() if one == self.matmuls), None)):
            (at, what, _), fix = wrong[-1], "choose this chip's table, or give times in microseconds"
            raise mistake(f"table {name} is of another chip: in {at[0]} {what}", fix, "matmuls")
        refuse(self, ((("matmuls", "microseconds", *at), what, fix) for at, what, fix in wrong))
        return self

    def _wrong_rates(self) -> Iterator[tuple[KeyPath, str, str]]:
        if self.matmuls is None:
            return
        for dtype in self.matmuls.microseconds:
            rates, peak = self.matmuls.rates(dtype), (self.peak_flops_per_second[dtype] or math.inf) / self.num_devices
            if math.isinf(peak):  # it is not published
                continue
            has, fix = (
                f"of which {self.name} has {peak / 1e12:.4g}",
                "give times in microseconds, of a whole batch, or choose this chip's table",
            )
            for depth, best in ((depth, max(row)) for depth, row in rates.items()):
                if best > MOST_OVER * peak:
                    yield (dtype, str(depth)), f"the best of these times is of {best / 1e12:.4g} TFLOP/s, {has}", fix
            if (best := max(map(max, rates.values()))) < LEAST_SHARE * peak:
                yield (dtype,), f"the best of these times is of {best / 1e12:.4g} TFLOP/s, {has}", fix

    @field_validator("peak_flops_per_second")
    @classmethod
    def _check_peaks(cls, peaks: dict[str, float | None]) -> dict[str, float | None]:
        if missing := [name for name in get_args(PeakType) if name not in peaks]:
            raise mistake(f"{missing[0]} has no value", f"give {missing[0]} in FLOP/s, or null where none is published")
        return peaks

    @property
    def power_share(self) -> float:
        """Returns the share of the arithmetic that a lower power limit leaves under load: its share of the power.

        Matmuls that are limited by power run far below the highest clock, where the voltage hardly falls any more, so
        a FLOP costs the same energy. The power of an idle chip makes the loss larger than that, the remaining fall of
        the voltage makes it smaller; each is about 5 % on an H100 at 500 of 700 W."""
        if not self.power_watts or not self.power_limit_watts:
            return 1.0
        return min(1.0, self.power_limit_watts / self.power_watts)


class TorusSpec(Config):
    """Chips of a slice linked to their neighbours; slices linked by their hosts' network (DCN)."""

    kind: Literal["torus"]
    link_bytes_per_second: PositiveFloat  # one way
    hop_seconds: PositiveFloat
    call_seconds: PositiveFloat  # until a collective of several chips moves data, besides its hops
    ring_ways: Literal[1, 2]  # in which a ring through chips of several axes sends, none of which wraps
    axes_at_once: UpToOne  # share of their bandwidth that several axes at once reach, of which one wraps
    core_bytes_per_second: PositiveFloat | None  # between the two devices of a chip, one way; None: one device
    wrapped_size: PositiveInt | None  # an axis of this size is a ring
    cube_size: PositiveInt | None  # in slices of whole cubes all axes are rings
    most_chips: PositiveInt  # of one slice
    small_shapes: tuple[ChipShape, ...]  # slices that exist besides whole cubes
    chips_per_host: ChipShape
    host_bytes_per_second: PositiveFloat  # into the DCN, one way
    host_seconds: PositiveFloat  # latency of a message over it
    slice_wait: NonNegativeFloat  # the share of a step that each doubling of the slices adds: they wait for the slowest
    chip_config: Text  # libtpu's name for how a chip is split into devices
    sources: dict[str, FigureSource]

    def wraps(self, shape: ChipShape) -> tuple[bool, ...]:
        """Returns which axes of a slice are rings: v5e (8, 16) -> (False, True)."""
        in_cubes = self.cube_size is not None and all(size % self.cube_size == 0 for size in shape)
        return tuple(in_cubes or size == self.wrapped_size for size in shape)

    def shapes(self) -> Iterator[ChipShape]:
        """Yields all slices that exist, with ascending sizes in each."""
        yield from self.small_shapes
        if self.cube_size:
            most = self.most_chips // self.cube_size**3
            for a in range(1, most + 1):
                for b in range(a, most // a + 1):
                    for c in range(b, most // (a * b) + 1):
                        yield self.cube_size * a, self.cube_size * b, self.cube_size * c

    def shape_of(self, num_chips: int) -> ChipShape | None:
        """Returns the slice of this many chips that is closest to a cube, or None."""
        fitting = [shape for shape in self.shapes() if math.prod(shape) == num_chips]
        return min(fitting, key=lambda shape: (sum(shape), max(shape)), default=None)


class SwitchSpec(Config):
    """Chips of a node behind one switch (NVLink), nodes over their network adapters (NIC).

    collectives, across: measured times of collectives behind the switch, and across nodes.
    """

    kind: Literal["switch"]
    chips_per_node: PositiveInt  # behind one switch
    chips_per_host: PositiveInt
    chip_bytes_per_second: PositiveFloat  # of one chip into the switch, one way
    node_bytes_per_second: PositiveFloat  # of all adapters of a node, one way
    collectives: NamedCollectives
    across: NamedCollectives
    sources: dict[str, FigureSource]

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        """Groups in the wrong table would never be read."""
        refuse(self, (*self._wrong_groups("collectives"), *self._wrong_groups("across")))
        return self

    def _wrong_groups(self, name: Literal["collectives", "across"]) -> Iterator[tuple[KeyPath, str, str]]:
        """Yields the problem of each row in the wrong table, or one of a table in the wrong place."""
        found, is_far = list(getattr(self, name).groups()), name == "across"
        wrong = [keys for keys, group in found if (group.nodes > 1) != is_far]
        of, other = ("of one node", "collectives") if is_far else ("across nodes", "across")
        choose = f"choose a table of groups {'across nodes' if is_far else 'of one node'}"
        if len(wrong) == len(found):
            what = f"the table is of groups {of}, and belongs into network.{other}"
            yield (name,), what, f"{choose}, of conf/calibration/_collectives.yaml"
            return
        for keys in wrong:
            what = f"{keys[-1]} is a group {of}, and belongs into network.{other}"
            yield (name, *keys), what, "move this row, or choose a table of conf/calibration/_collectives.yaml"

    def shape_of(self, num_chips: int) -> ChipShape | None:
        """Returns (nodes, GPUs of each) of this many GPUs: whole nodes, or equal parts of a rack's NVLink domains in
        whole hosts. None if they do not divide so."""
        if num_chips <= self.chips_per_node:
            return (1, num_chips) if self.is_in_whole_hosts(num_chips) else None
        num_nodes = -(-num_chips // self.chips_per_node)
        each, rest = divmod(num_chips, num_nodes)
        is_rack = self.chips_per_node > self.chips_per_host and each % self.chips_per_host == 0
        return (num_nodes, each) if rest == 0 and (each == self.chips_per_node or is_rack) else None

    def is_in_whole_hosts(self, num_chips: int) -> bool:
        """Returns whether so many GPUs behind one switch are a part of one host, or whole hosts."""
        return num_chips <= self.chips_per_host or num_chips % self.chips_per_host == 0

    @property
    def nic_bytes_per_second(self) -> float:
        """Returns a GPU's share of its node's adapters, one way."""
        return self.node_bytes_per_second / self.chips_per_node


class CpuTarget(Config):
    """Devices simulated on this machine's processor."""

    kind: Literal["cpu"]
    num_devices: PositiveInt

    @property
    def name(self) -> str:
        return f"cpu-{self.num_devices}"


class LocalTarget(Config):
    """Devices attached to this machine."""

    kind: Literal["local"]
    num_devices: PositiveInt | None  # None: all that are attached
    peak_flops_per_second: PositiveFloat | None  # of one device, in the compute type; None: its chip's, if known
    hbm_bytes_per_device: NumBytes | None  # None: its chip's, if known

    @property
    def name(self) -> str:
        return "local"


class TpuTarget(Config):
    """Slices of TPUs."""

    kind: Literal["tpu"]
    shape: ChipShape  # chips along each axis of one slice
    num_slices: PositiveInt
    chip: ChipSpec
    network: TorusSpec

    @property
    def name(self) -> str:
        slice_name = torus_name(self.chip, self.network, self.shape)
        return slice_name if self.num_slices == 1 else f"{self.num_slices} x {slice_name}"

    @model_validator(mode="after")
    def _exists(self) -> Self:
        if self.shape not in self.network.shapes():
            what = f"there is no slice of {'x'.join(map(str, self.shape))} chips of {self.chip.name}"
            raise mistake(what, f"use one of {slices_that_exist(self.chip, self.network)}", "shape")
        return self


class GpuTarget(Config):
    """Nodes of GPUs."""

    kind: Literal["gpu"]
    shape: Annotated[ChipShape, Field(min_length=2, max_length=2)]  # nodes, GPUs in each
    chip: ChipSpec
    network: SwitchSpec

    @property
    def name(self) -> str:
        num_nodes, per_node = self.shape
        is_usual = self.network.shape_of(num_nodes * per_node) == self.shape
        return f"{self.chip.name}-{num_nodes * per_node}" if is_usual else f"{self.chip.name}:{num_nodes}x{per_node}"

    @model_validator(mode="after")
    def _exists(self) -> Self:
        if self.shape[1] > self.network.chips_per_node:
            what = f"a node of {self.chip.name} has {counted(self.network.chips_per_node, 'GPU')}, not {self.shape[1]}"
            fix = f"use {self.chip.name}-N, or {self.chip.name}:NODESx{self.network.chips_per_node}"
            raise mistake(what, fix, "shape")
        if not self.network.is_in_whole_hosts(self.shape[1]):
            host = counted(self.network.chips_per_host, "GPU")
            what = f"{self.shape[1]} GPUs of {self.chip.name} are not whole hosts, which have {host}"
            raise mistake(what, f"use a multiple of {self.network.chips_per_host}", "shape")
        return self


TargetSpec = Annotated[CpuTarget | LocalTarget | TpuTarget | GpuTarget, Field(discriminator="kind")]


def torus_name(chip: ChipSpec, network: TorusSpec, shape: ChipShape) -> str:
    """Returns the common name of a slice: v5p-128, or v5p:4x4x32 if another shape has that name."""
    if network.shape_of(math.prod(shape)) == shape:
        return f"{chip.name}-{math.prod(shape) * chip.num_cores}"
    return f"{chip.name}:{'x'.join(map(str, shape))}"


def slices_that_exist(chip: ChipSpec, network: TorusSpec) -> str:
    """Returns all slices of a chip, for messages: 'v5e-1, v5e-4, ... v5e-256'."""
    named = ", ".join(torus_name(chip, network, shape) for shape in network.small_shapes)
    if not network.cube_size:
        return named
    largest = min((s for s in network.shapes() if math.prod(s) == network.most_chips), key=sum)
    cubes = f"{chip.name}:AxBxC of multiples of {network.cube_size}, each no smaller than the one before"
    return f"{named}, and {cubes}, up to {torus_name(chip, network, largest)}"


def nearest_slices(chip: ChipSpec, network: TorusSpec, num_cores: int) -> list[str]:
    """Returns the names of the slices next below and above a number of cores, as names count them."""
    sizes = sorted({math.prod(shape) * chip.num_cores for shape in network.shapes()})
    below = [size for size in sizes if size < num_cores][-1:]
    above = [size for size in sizes if size > num_cores][:1]
    return [f"{chip.name}-{size}" for size in below + above]
