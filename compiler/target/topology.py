"""Finds the devices that a step is compiled for: this machine's, or chips that need not be attached.

An NVIDIA GPU is described to XLA's compiler as a GpuTargetConfigProto in text form, with the figures of conf/target and
with limits that all of these GPUs share: openxla/xla, xla/backends/gpu/target_config/specs, which XLA's own tools read
from real devices.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from ..core.config_types import CompilerOption
from ..core.errors import ConfigError, Problem
from ..core.format import be, counted
from ..spec.attached import COMPILERS, is_installed
from ..spec.target_spec import ChipSpec, TargetSpec, TpuTarget
from .target import TargetPlan, topology_arguments

# Without these, libtpu asks the metadata server of a TPU machine, requires a host name, and locks out other processes.
# It reads them when it is loaded. The accelerator type may be any that exists: the topology's name selects one.
LIBTPU_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4",
                      "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # fmt: skip
CUDA_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1"}

# XLA finds the fastest Triton tiling by running them, which requires a device.
WITHOUT_DEVICE: dict[str, dict[str, CompilerOption]] = {"gpu": {"xla_gpu_enable_triton_gemm": False}}
KIB = 2**10


def find_devices(spec: TargetSpec, target: TargetPlan) -> Sequence[Any]:
    """Returns the target's devices, or descriptions of them if they are not attached.

    Raises ConfigError if the compiler for the chip is not installed, or if too few devices are attached.
    """
    if target.is_attached:
        devices = jax.devices()
        if len(devices) < target.num_devices:
            found = f"{counted(len(devices), 'device')} {be(len(devices))} attached"
            what = f"target {target.name} has {counted(target.num_devices, 'device')}, but {found}"
            raise ConfigError([Problem("target", what, "use target=local for all of them")])
        return devices[: target.num_devices]
    check_compiler(target)
    if isinstance(spec, TpuTarget):
        os.environ.update(LIBTPU_ENVIRONMENT)
        return _described(target, "tpu", target.topology_name or "", topology_arguments(spec))
    assert target.chip is not None
    os.environ.update(CUDA_ENVIRONMENT)
    config = gpu_target_config(target.chip)
    arguments = {"target_config": config, "topology": target.topology_name}
    return _described(target, "cuda", target.name, arguments)


def check_compiler(target: TargetPlan) -> None:
    """Raises ConfigError if the compiler for the target's chip is not installed."""
    if target.is_attached:
        return
    _, extra, library = COMPILERS[target.platform]
    if not is_installed(target.platform):
        what = f"compiling for {target.name} needs {library}, which is not installed"
        raise ConfigError([Problem("target", what, f"pip install 'meshloom[{extra}]'")])


def installed_compilers() -> dict[str, str]:
    """Returns the installed compilers for chips, by kind: {"GPU": "JAX's CUDA plugin", "TPU": "libtpu"}."""
    return {name.upper(): library for name, (_, _, library) in COMPILERS.items() if is_installed(name)}


def options_without_device(target: TargetPlan) -> dict[str, CompilerOption]:
    """Returns the options for compiling for chips that are not attached; the declaration's options take precedence."""
    return {} if target.is_attached else WITHOUT_DEVICE.get(target.platform, {})


def _described(target: TargetPlan, platform: str, name: str, arguments: Mapping[str, Any]) -> Sequence[Any]:
    try:
        devices = topologies.get_topology_desc(name, platform, **arguments).devices
    except (NotImplementedError, jax.errors.JaxRuntimeError, RuntimeError) as error:
        what = f"the compiler does not know {target.name}: {str(error).splitlines()[0]}"
        raise ConfigError([Problem("target", what, "choose another target, or another version of the compiler")]) from error  # fmt: skip  # noqa: E501
    assert len(devices) == target.num_devices, f"{len(devices)} devices in the topology of {target.name}"
    return devices


def gpu_target_config(chip: ChipSpec) -> str:
    """Returns the description of a GPU. Its memory is the part that programs may use, as a real device reports it."""
    processor = chip.processor
    assert processor is not None, f"{chip.name} is described as a GPU and has no processor"
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
        f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 }} runtime_version {{ major: 13 }} '
        f'device_description_str: "{chip.device_kind}"'
    )
