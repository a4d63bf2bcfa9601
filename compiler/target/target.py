"""Plans the devices that the step is compiled for: their number, their links, the speed and memory of each, and what a
calibration changes of these figures.

    matmul 1.25, ICI transfer 1.1   ->   efficiency of matmuls / 1.25, bandwidth of a link / 1.1
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from ..core.errors import ConfigError, Problem
from ..core.float_types import ComputeType, PeakType, peak_name
from ..core.kernels import AttentionCall, RatedBy
from ..core.traffic import HostCopyKind
from ..spec.attached import LOCAL, automatic
from ..spec.calibration_spec import AUTO_CHIP, UNCALIBRATED, Calibration, LinkCalibration
from ..spec.compiler_traits import CompilerTraits, read_compiler_traits
from ..spec.flag_presets import Effects, FlagPreset, read_flag_presets, read_option_effects
from ..spec.kernel_rates import kernel_flops_per_second
from ..spec.own_calibrations import own_calibration
from ..spec.target_names import chip_file, kinds
from ..spec.target_spec import (
    ChipShape,
    ChipSpec,
    CpuTarget,
    Efficiency,
    GpuTarget,
    LocalTarget,
    SwitchSpec,
    TargetSpec,
    TorusSpec,
    TpuTarget,
)
from .matmul_times import MatmulTimes

AS_DECLARED = LinkCalibration(transfer=1.0, latency=1.0)


@dataclass(frozen=True)
class TargetPlan:
    """A target with its figures, per JAX *device* where the name says so; `chip` has the figures of a chip. None:
    unknown.

    shape: chips of a slice along the axes of its torus, or (nodes, GPUs in each); None for simulated devices, and for
    attached devices without such a shape. topology_name: the name for `jax.experimental.topologies.get_topology_desc`.
    compiler: traits of XLA's compiler for it. flag_presets: presets of its options, by name. option_effects: what
    each option does to overlap. calibration: the one that the figures of chip and network include. assumed: what nobody
    measured of figures, by their key in `conf/target`, besides those that a declaration or a calibration replaced.
    """

    name: str  # its common name
    platform: str  # JAX's name: cpu, gpu, tpu
    num_devices: int  # JAX devices in all slices
    chip: ChipSpec | None
    network: TorusSpec | SwitchSpec | None
    num_chips: int
    num_slices: int
    shape: ChipShape | None
    topology_name: str | None
    peak_flops_per_second: float | None  # of one device, in the compute type
    hbm_bytes_per_device: int | None  # the part that a program may use
    compiler: CompilerTraits
    flag_presets: Mapping[str, FlagPreset]
    option_effects: Effects
    calibration: Calibration | None = None
    assumed: Mapping[str, str] = field(default_factory=dict)

    def matmul_times(self, factor: float = 1.0) -> MatmulTimes | None:
        """Returns the times of matmuls under the load of a run; None where none were measured. factor: by how much they
        take longer still, by a calibration."""
        if self.chip is None or self.chip.matmuls is None:
            return None
        return MatmulTimes(self.chip.matmuls, 1 / (self.chip.sustained * self.chip.power_share), factor)

    def kernel_rate(self, of: RatedBy) -> float | None:
        """Returns the FLOP/s that a kernel keeps over a run; None where they are not known.

        Attention and grouped matmuls were measured under load: `sustained` is what a run leaves of single matmuls."""
        chip, peak, slower = self.chip, self.peak_flops_per_second, self.calibration
        if chip is None or peak is None:
            return None
        alone = kernel_flops_per_second(of, peak, chip.attention) * chip.power_share
        if slower is None:
            return alone
        return alone / (slower.attention if isinstance(of, AttentionCall) else slower.matmul)

    @property
    def slice_wait(self) -> float:
        """Returns the share of a step for which its slices wait for the slowest of them, besides their collectives."""
        each = self.network.slice_wait if isinstance(self.network, TorusSpec) else 0.0
        return each * math.log2(self.num_slices)

    def peak_of(self, dtype: str) -> float | None:
        """Returns the peak FLOP/s of a device for matmuls of operands of a type: in a type of few bits that its
        compiler makes faster, the peak of that type, else the peak in the compute type."""
        name = peak_name(dtype)
        return _peak(self.chip, name) if self.chip and name in self.real_types else self.peak_flops_per_second

    @property
    def real_types(self) -> tuple[PeakType, ...]:
        """Returns the types of few bits in which its compiler makes matmuls faster; none for an unknown chip."""
        return self.chip.real_types if self.chip else ()

    @property
    def hbm_bytes_per_chip(self) -> int | None:
        return self.chip.hbm_bytes if self.chip else None

    @property
    def host_bytes_per_device(self) -> int | None:
        """Returns a device's share of the memory of its host."""
        return self.chip.host_bytes // self.chip.num_devices if self.chip and self.chip.host_bytes else None

    def host_bytes_per_second(self, kind: HostCopyKind) -> float | None:
        """Returns the speed of a copy between a device and its host, while all devices copy; None: unknown."""
        if self.chip is None:
            return None
        link = self.chip.host_link
        whole = link.to_device_bytes_per_second if kind == "copy-to-device" else link.to_host_bytes_per_second
        return whole / (min(link.num_chips, self.num_chips) * self.used_devices_per_chip)

    @property
    def hbm_bytes_per_second_per_device(self) -> float | None:
        return self.chip.hbm_bytes_per_second / self.chip.num_devices if self.chip else None

    @property
    def devices_per_chip(self) -> int:
        return self.chip.num_devices if self.chip else 1

    @property
    def used_devices_per_chip(self) -> int:
        """Returns the JAX devices per chip, which scale a device's figures to a chip's; 1 if a run uses part of a
        chip."""
        return max(1, self.num_devices // self.num_chips)

    @property
    def described(self) -> str:
        """Returns the name, and for devices of this machine what they are: cpu-8 (simulated: ...), local (8 of TPU
        v5e)."""
        if self.name == LOCAL:
            return f"{self.name} ({self.num_devices} of {jax.devices()[0].device_kind})"
        if not self.is_attached:
            return self.name
        found, why = automatic()
        return f"{self.name} (simulated{'' if found == LOCAL else f': {why}'})"

    @property
    def is_attached(self) -> bool:
        """Returns True for the devices of this machine, False for chips that are only described."""
        return self.topology_name is None


def plan_target(spec: TargetSpec, compute: ComputeType) -> TargetPlan:
    """Returns the target with its devices counted. Only `local` looks at attached devices."""
    match spec:
        case CpuTarget():
            return _plain(spec.name, "cpu", spec.num_devices)
        case LocalTarget():
            return _local(spec, compute)
        case TpuTarget():
            shape = "x".join(map(str, spec.shape))
            return _of_chips(spec, "tpu", spec.num_slices, f"{spec.chip.known_as}:{shape}", compute)
        case GpuTarget():
            return _of_chips(spec, "gpu", 1, f"1x{spec.shape[0]}x{spec.shape[1]}", compute)


def topology_arguments(spec: TpuTarget) -> dict[str, Any]:
    """Returns the arguments of `get_topology_desc` besides the topology's name, for slices of TPUs: hosts, rings,
    number of slices.

    libtpu takes three axes, whatever the torus has.
    """
    axes = 3 - len(spec.shape)
    host = [min(size, most) for size, most in zip(spec.shape, spec.network.chips_per_host, strict=True)]
    slices = {"num_slices": spec.num_slices} if spec.num_slices > 1 else {}
    return {
        "chip_config_name": spec.network.chip_config,
        "chips_per_host_bounds": (*host, *(1,) * axes),
        "wrap": (*spec.network.wraps(spec.shape), *(False,) * axes),
        **slices,
    }


def _of_chips(
    spec: TpuTarget | GpuTarget, platform: str, num_slices: int, topology_name: str, compute: ComputeType
) -> TargetPlan:
    chip, num_chips = _with_own_limit(spec.chip), math.prod(spec.shape) * num_slices
    return TargetPlan(
        name=spec.name,
        platform=platform,
        num_devices=num_chips * chip.num_devices,
        chip=chip,
        network=spec.network,
        num_chips=num_chips,
        num_slices=num_slices,
        shape=spec.shape,
        topology_name=topology_name,
        peak_flops_per_second=_peak(chip, compute),
        hbm_bytes_per_device=chip.compiler_hbm_bytes // chip.num_devices,
        compiler=read_compiler_traits(platform, chip.known_as),
        flag_presets=read_flag_presets(platform, chip.known_as),
        option_effects=read_option_effects(platform, chip.known_as),
        assumed=_assumed(chip, spec.network),
    )


def _with_own_limit(chip: ChipSpec) -> ChipSpec:
    """Returns a chip of the user whose programs may use what the kind that it is made of leaves to them, of its own
    memory, unless it says how much that is."""
    if chip.name == chip.known_as or chip.known_as not in kinds():
        return chip
    made_of, _ = chip_file(chip.known_as)
    if chip.hbm_bytes == made_of.hbm_bytes or chip.compiler_hbm_bytes != made_of.compiler_hbm_bytes:
        return chip
    reserved = made_of.hbm_bytes - made_of.compiler_hbm_bytes
    return chip.model_copy(update={"compiler_hbm_bytes": chip.hbm_bytes - reserved})


def _assumed(chip: ChipSpec, network: TorusSpec | SwitchSpec) -> dict[str, str]:
    """Returns `TargetPlan.assumed` of these figures."""
    shipped = chip_file(chip.known_as) if chip.known_as in kinds() else (chip, network)
    return {
        f"{part}.{name}": source.assumed
        for part, spec, of_file in zip(("chip", "network"), (chip, network), shipped, strict=True)
        for name, source in spec.sources.items()
        if source.assumed and getattr(spec, name) is not None
        and not (source == of_file.sources.get(name) and getattr(spec, name) != getattr(of_file, name))
    }  # fmt: skip


def _plain(name: str, platform: str, num_devices: int) -> TargetPlan:
    """Returns a target with a known number of devices and no other figures."""
    return TargetPlan(
        name=name,
        platform=platform,
        num_devices=num_devices,
        chip=None,
        network=None,
        num_chips=num_devices,
        num_slices=1,
        shape=None,
        topology_name=None,
        peak_flops_per_second=None,
        hbm_bytes_per_device=None,
        compiler=read_compiler_traits(platform, None),
        flag_presets=read_flag_presets(platform, None),
        option_effects=read_option_effects(platform, None),
    )


def _local(spec: LocalTarget, compute: ComputeType) -> TargetPlan:
    """Returns the attached devices; a chip with a file is recognised by its kind of device."""
    attached = jax.devices()
    devices = attached[: spec.num_devices or len(attached)]
    plan = _plain(spec.name, jax.default_backend(), spec.num_devices or len(attached))
    files = (chip_file(kind) for kind in kinds() if kind != "cpu")
    known = next((file for file in files if file[0].device_kind == devices[0].device_kind), None)
    peak, hbm = spec.peak_flops_per_second, spec.hbm_bytes_per_device
    if known:
        chip, network = known
        peak, hbm = peak or _peak(chip, compute), hbm or chip.compiler_hbm_bytes // chip.num_devices
        num_slices, shape = _attached_shape(devices, chip, network)
        num_chips = max(1, plan.num_devices // chip.num_devices)
        plan = replace(
            plan,
            chip=chip,
            network=network,
            num_chips=num_chips,
            num_slices=num_slices,
            shape=shape,
            compiler=read_compiler_traits(plan.platform, chip.known_as),
            flag_presets=read_flag_presets(plan.platform, chip.known_as),
            option_effects=read_option_effects(plan.platform, chip.known_as),
            assumed=_assumed(chip, network),
        )
    return replace(plan, peak_flops_per_second=peak, hbm_bytes_per_device=hbm)


def _attached_shape(
    devices: Sequence[Any], chip: ChipSpec, network: TorusSpec | SwitchSpec
) -> tuple[int, ChipShape | None]:
    """Returns (slices, shape of one) of attached devices. The shape is None if they do not fill one, such as a part of
    a slice."""
    groups = {getattr(device, "slice_index", 0) or 0 for device in devices}  # GPUs that share NVLink have one index
    if isinstance(network, SwitchSpec):
        num_nodes, rest = len(groups), len(devices) % len(groups)
        return 1, None if rest else (num_nodes, len(devices) // num_nodes)
    num_axes = len(network.chips_per_host)
    along = [{device.coords[i] for device in devices} for i in range(num_axes)]
    shape = tuple(max(places) - min(places) + 1 for places in along)
    fills = math.prod(shape) * chip.num_devices * len(groups) == len(devices)
    return len(groups), shape if fills else None


def _peak(chip: ChipSpec, compute: PeakType) -> float | None:
    """Returns the peak FLOP/s of one device."""
    peak = chip.peak_flops_per_second[compute]
    return peak / chip.num_devices if peak else None


def faster_matmuls(target: TargetPlan, share: float | None) -> TargetPlan:
    """Returns the target whose matmuls reach this share of the peak; None: what they reach by themselves."""
    if target.chip is None or share is None:
        return target
    kernels, efficiency = target.chip.kernels, target.chip.efficiency
    matmul = efficiency.matmul * share / kernels.matmul  # which a calibration may have changed
    update = {
        "kernels": kernels.model_copy(update={"matmul": share}),
        "efficiency": efficiency.model_copy(update={"matmul": matmul}),
    }
    return replace(target, chip=target.chip.model_copy(update=update))


def calibrate_target(target: TargetPlan, calibration: Calibration) -> TargetPlan:
    """Returns the target with calibrated figures; everything that is priced from a target follows. Raises ConfigError
    for a calibration of another chip. `auto` is what the user keeps for the chip.

    Schedules are priced by the compiler's cycles instead of the efficiencies, so the target also holds the factors.
    """
    found = target.chip.name if target.chip else None
    if calibration.chip == AUTO_CHIP:
        calibration = (own_calibration(found) if found else None) or UNCALIBRATED
    if calibration.chip is None:
        return target
    if target.chip is None or target.network is None or found != calibration.chip:
        has = f"chips of {found}" if found else "no chip that is known"
        what = f"is of {calibration.chip}, and target {target.name} has {has}"
        raise ConfigError([Problem("calibration", what, "choose calibration=none, or one of that chip")])
    share = target.chip.efficiency
    efficiency = Efficiency.model_construct(  # it may exceed 1: a figure of the chip may be too low
        matmul=share.matmul / calibration.matmul,
        memory=share.memory / calibration.other,
    )
    chip, network = target.chip.model_copy(update={"efficiency": efficiency}), _network(target.network, calibration)
    return replace(target, chip=chip, network=network, calibration=calibration, assumed=_assumed(chip, network))


def _network(network: TorusSpec | SwitchSpec, calibration: Calibration) -> TorusSpec | SwitchSpec:
    """Returns the links, slower by the factors of each kind."""
    if isinstance(network, TorusSpec):
        near, far = (calibration.links.get(kind, AS_DECLARED) for kind in ("ICI", "DCN"))
        core = network.core_bytes_per_second
        update = {
            "link_bytes_per_second": network.link_bytes_per_second / near.transfer,
            "core_bytes_per_second": core and core / near.transfer,
            "hop_seconds": network.hop_seconds * near.latency,
            "call_seconds": network.call_seconds * near.latency,
            "host_bytes_per_second": network.host_bytes_per_second / far.transfer,
            "host_seconds": network.host_seconds * far.latency,
        }
        return network.model_copy(update=update)
    near, far = (calibration.links.get(kind, AS_DECLARED) for kind in ("NVLink", "NIC"))
    update = {  # their latencies are with the measured times (axis_segments.switch_times)
        "chip_bytes_per_second": network.chip_bytes_per_second / near.transfer,
        "node_bytes_per_second": network.node_bytes_per_second / far.transfer,
    }
    return network.model_copy(update=update)
