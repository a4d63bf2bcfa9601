"""Describes an NVIDIA GPU to XLA's compiler on a machine without one: a GpuTargetConfigProto in text form.

Figures of `ChipSpec` are in `conf/target/`; those that only the compiler needs are here. Source of all of them:
openxla/xla, xla/backends/gpu/target_config/specs, which XLA's own tools read off real devices.
"""

from dataclasses import dataclass

from ..spec.target_spec import ChipSpec

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Processor:
    """A GPU's processor. compute_capability: (major, minor). shared_memory: of a multiprocessor, and the most that a
    block may ask for."""

    compute_capability: tuple[int, int]
    num_multiprocessors: int
    fpus_per_multiprocessor: int
    shared_memory_bytes: int
    shared_memory_per_block_bytes: int
    l2_cache_bytes: int


_HOPPER = Processor((9, 0), 132, 128, 228 * KIB, 227 * KIB, 50 * MIB)
PROCESSORS = {
    "a100": Processor((8, 0), 108, 64, 164 * KIB, 163 * KIB, 40 * MIB),
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": Processor((10, 0), 148, 128, 228 * KIB, 227 * KIB, 132_644_864),
}


def gpu_target_config(chip: ChipSpec) -> str:
    """Returns the text for one of PROCESSORS. Its memory is what programs may use, as a real device reports too."""
    processor = PROCESSORS[chip.name]
    major, minor = processor.compute_capability
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * KIB,
        "shared_memory_per_core": processor.shared_memory_bytes,
        "shared_memory_per_block_optin": processor.shared_memory_per_block_bytes,
        "threads_per_core_limit": 2048,
        "core_count": processor.num_multiprocessors,
        "fpus_per_core": processor.fpus_per_multiprocessor,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": int(chip.hbm_bytes_per_second),
        "l2_cache_size": processor.l2_cache_bytes,
        "clock_rate_ghz": chip.clock_hz / 1e9,
        "device_memory_size": chip.compiler_hbm_bytes,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    info = " ".join(f"{name}: {value}" for name, value in fields.items())
    return (
        f"gpu_device_info {{ {info} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
        f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 7 }} runtime_version {{ major: 13 }} '
        f'device_description_str: "{chip.device_kind}"'
    )
