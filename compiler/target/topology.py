"""The devices that a step is compiled for: this machine's, or chips that need not be attached."""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

from ..core.errors import ConfigError, Problem
from ..core.format import be, counted
from ..spec.spec import CompilerOption
from ..spec.target_spec import TargetSpec, TpuTarget
from .gpu_config import gpu_target_config
from .target import TargetPlan, topology_arguments

# Without these, libtpu asks the metadata server of a TPU machine, requires a host name, and locks out other processes.
# It reads them when it is loaded. The accelerator type may be any that exists: the topology's name selects one.
LIBTPU_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4",
                      "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # fmt: skip
CUDA_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1"}

# XLA finds the fastest Triton tiling by running them, which requires a device.
WITHOUT_DEVICE: dict[str, dict[str, CompilerOption]] = {"gpu": {"xla_gpu_enable_triton_gemm": False}}


def find_devices(spec: TargetSpec, target: TargetPlan) -> Sequence[Any]:
    """Returns the target's devices; for chips that are not attached, descriptions of them.

    Raises ConfigError if the compiler for the chip is not installed, or if too few devices are attached.
    """
    if target.is_attached:
        return _attached(target)
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
    is_there, extra, library = _COMPILERS[target.platform]
    if not is_there():
        what = f"compiling for {target.name} needs {library}, which is not installed"
        raise ConfigError([Problem("target", what, f"pip install 'meshloom[{extra}]'")])


def installed_compilers() -> dict[str, str]:
    """Returns the installed compilers for chips, by kind: {"GPU": "JAX's CUDA plugin", "TPU": "libtpu"}."""
    return {platform.upper(): library for platform, (is_there, _, library) in _COMPILERS.items() if is_there()}


def options_without_device(target: TargetPlan) -> dict[str, CompilerOption]:
    """Returns the options for compiling for chips that are not attached; the declaration's take precedence."""
    return {} if target.is_attached else WITHOUT_DEVICE.get(target.platform, {})


def _attached(target: TargetPlan) -> Sequence[Any]:
    devices = jax.devices()
    if len(devices) < target.num_devices:
        found = f"{counted(len(devices), 'device')} {be(len(devices))} attached"
        what = f"target {target.name} has {counted(target.num_devices, 'device')}, but {found}"
        raise ConfigError([Problem("target", what, "use target=local for all of them")])
    return devices[: target.num_devices]


def _described(target: TargetPlan, platform: str, name: str, arguments: Mapping[str, Any]) -> Sequence[Any]:
    try:
        devices = topologies.get_topology_desc(name, platform, **arguments).devices
    except (NotImplementedError, jax.errors.JaxRuntimeError, RuntimeError) as error:
        what = f"the compiler does not know {target.name}: {str(error).splitlines()[0]}"
        raise ConfigError([Problem("target", what, "choose another target, or another version of the compiler")]) from error  # fmt: skip  # noqa: E501
    assert len(devices) == target.num_devices, f"{len(devices)} devices in the topology of {target.name}"
    return devices


def _has_libtpu() -> bool:
    return _is_installed("libtpu")


def _has_cuda() -> bool:
    return _is_installed("jax_plugins.xla_cuda13") or _is_installed("jax_plugins.xla_cuda12")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # its parent package is not installed
        return False


_COMPILERS: dict[str, tuple[Callable[[], bool], str, str]] = {
    "gpu": (_has_cuda, "cuda", "JAX's CUDA plugin"),
    "tpu": (_has_libtpu, "tpu", "libtpu"),
}
