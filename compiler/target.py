"""Which devices the step is for: their number and what is known of one."""

from dataclasses import dataclass

import jax

from .spec import TargetSpec


@dataclass(frozen=True)
class TargetPlan:
    """name: as the user says it. peak_flops_per_second, hbm_bytes: of one device, None where unknown."""

    name: str
    platform: str  # as JAX says it: cpu, gpu, tpu
    num_devices: int
    peak_flops_per_second: float | None
    hbm_bytes_per_device: int | None


def plan_target(spec: TargetSpec) -> TargetPlan:
    """The target with its number of devices settled. Only `local` looks at what is attached."""
    attached = jax.devices() if spec.num_devices is None else None
    return TargetPlan(
        name=spec.name,
        platform=jax.default_backend() if spec.kind == "local" else "cpu",
        num_devices=len(attached) if attached else int(spec.num_devices or 0),
        peak_flops_per_second=spec.peak_flops_per_second,
        hbm_bytes_per_device=spec.hbm_bytes_per_device,
    )
