"""A calibrated target: its figures as runs have shown them. Everything that is priced from a target follows.

    matmul 1.25, ICI transfer 1.1   ->   efficiency of matmuls / 1.25, bandwidth of a link / 1.1

Schedules are not priced by the efficiencies but by the compiler's cycles, so the factors go with the target besides.
"""

from dataclasses import replace

from ..core.errors import ConfigError, Problem
from ..spec.calibration_spec import Calibration, LinkCalibration
from ..spec.target_spec import Efficiency, SwitchSpec, TorusSpec
from .target import TargetPlan

AS_DECLARED = LinkCalibration(transfer=1.0, latency=1.0)


def calibrate_target(target: TargetPlan, calibration: Calibration) -> TargetPlan:
    """Returns the target with calibrated figures. Raises ConfigError for a calibration of another chip."""
    if calibration.chip is None:
        return target
    found = target.chip.name if target.chip else None
    if target.chip is None or target.network is None or found != calibration.chip:
        has = f"chips of {found}" if found else "no chip that is known"
        what = f"is of {calibration.chip}, and target {target.name} has {has}"
        raise ConfigError([Problem("calibration", what, "choose calibration=none, or one of that chip")])
    share = target.chip.efficiency
    efficiency = Efficiency.model_construct(  # more than 1 is possible: a figure of the chip may be too low
        matmul=share.matmul / calibration.matmul,
        attention={size: each / calibration.attention for size, each in share.attention.items()},
        memory=share.memory / calibration.other,
    )
    return replace(
        target,
        chip=target.chip.model_copy(update={"efficiency": efficiency}),
        network=_network(target.network, calibration),
        calibration=calibration,
    )


def _network(network: TorusSpec | SwitchSpec, calibration: Calibration) -> TorusSpec | SwitchSpec:
    """Returns the links, slower by the factors of each kind."""
    if isinstance(network, TorusSpec):
        near, far = (calibration.links.get(kind, AS_DECLARED) for kind in ("ICI", "DCN"))
        core = network.core_bytes_per_second
        update = {
            "link_bytes_per_second": network.link_bytes_per_second / near.transfer,
            "core_bytes_per_second": core and core / near.transfer,
            "hop_seconds": network.hop_seconds * near.latency,
            "host_bytes_per_second": network.host_bytes_per_second / far.transfer,
            "host_seconds": network.host_seconds * far.latency,
        }
        return network.model_copy(update=update)
    near, far = (calibration.links.get(kind, AS_DECLARED) for kind in ("NVLink", "NIC"))
    update = {
        "chip_bytes_per_second": network.chip_bytes_per_second / near.transfer,
        "chip_seconds": network.chip_seconds * near.latency,
        "node_bytes_per_second": network.node_bytes_per_second / far.transfer,
        "node_seconds": network.node_seconds * far.latency,
    }
    return network.model_copy(update=update)
