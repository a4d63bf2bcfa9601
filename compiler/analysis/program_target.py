"""Whether a program was compiled for a target, by what its text and its devices tell."""

import re
from collections.abc import Iterator

from ..core.errors import Problem
from ..core.format import counted
from ..target.target import TargetPlan
from ..xla.hlo import Module

NAME_IT = "name the target that it was compiled for"
# What only one platform's compiler writes; the first that is found says it. A text may have none of them.
_MARKS = {
    "tpu": re.compile(r":T\(|\"estimated_cycles\""),  # tiled layouts, and what the compiler estimates
    "gpu": re.compile(r'fingerprint_before_lhs|"operation_queue_id"|"force_earliest_schedule"|"fusion_backend_config"'
                      r'|"__(?:cublas|cudnn|triton|gpu)\b'),
    "cpu": re.compile(r'"outer_dimension_partitions"|"__(?:onednn|ynn_fusion)|"xla_ffi_(?:partitioned_)?python_cpu'),
}  # fmt: skip
_SHOWN = {"tpu": "TPUs", "gpu": "GPUs", "cpu": "CPUs"}
_OF_TWO_CORES = re.compile(r'"megacore_config"')  # libtpu 0.0.42.1 writes it for these alone
_CHIPS_OF_TWO_CORES = ("v4", "v5p")


def target_mismatches(module: Module, text: str, target: TargetPlan) -> Iterator[Problem]:
    """Yields why a program's text is not one of this target."""
    # A program for several slices of TPUs counts the devices of one.
    if (num := module.num_devices) not in (target.num_devices, target.num_devices // target.num_slices):
        what = f"the program is for {counted(num, 'device')}, and {target.name} has {target.num_devices}"
        yield Problem("target", what, NAME_IT)
    platform = next((name for name, mark in _MARKS.items() if mark.search(text)), None)
    if platform not in (None, target.platform) or (platform is None and target.platform == "tpu"):
        was = f"was compiled for {_SHOWN[platform]}" if platform else "was not compiled for TPUs"
        yield Problem("target", f"the program {was}, and {target.name} is of platform {target.platform}", NAME_IT)
    elif (
        target.chip and platform == "tpu" and _OF_TWO_CORES.search(text) and target.chip.name not in _CHIPS_OF_TWO_CORES
    ):
        what = f"the program was compiled for chips of two cores that work as one, {' or '.join(_CHIPS_OF_TWO_CORES)}"
        yield Problem("target", f"{what}, and {target.name} has none", NAME_IT)


def problems_of_devices(platform: str, kind: str, target: TargetPlan) -> Iterator[Problem]:
    """Yields why a program's own devices are not the target's. platform, kind: JAX's names."""
    if platform != target.platform or (target.chip and kind != target.chip.device_kind):
        has = target.chip.device_kind if target.chip else f"devices of platform {target.platform}"
        yield Problem(
            "target", f"the program was compiled for {kind} ({platform}), and {target.name} has {has}", NAME_IT
        )
