"""Finds what is attached to this machine, without starting JAX, which takes seconds and claims the chips.

`target=auto`, the default, is `local` where JAX has an accelerator to use, and eight simulated devices elsewhere.
"""

import os
import sys
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

# By platform: the modules of which one has to be installed, the extra that installs it, and what it is called.
COMPILERS = {
    "gpu": (("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"), "cuda", "JAX's CUDA plugin"),
    "tpu": (("libtpu",), "tpu", "libtpu"),
}
AUTO, LOCAL, SIMULATED = "auto", "local", "cpu-8"


def attached_kinds() -> tuple[str, ...]:
    """Returns gpu, tpu or both, for the GPUs and TPUs of this machine, by the device files that JAX looks for."""
    # The file imports nothing of JAX, and `import jax` takes longer than to read a declaration.
    jax = find_spec("jax")
    assert jax is not None
    assert jax.origin is not None
    place = spec_from_file_location("meshloom_hardware_utils", Path(jax.origin).parent / "_src/hardware_utils.py")
    assert place is not None
    assert place.loader is not None
    place.loader.exec_module(files := module_from_spec(place))
    has = {
        "gpu": files.has_visible_nvidia_gpu() and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1"),
        "tpu": files.num_available_tpu_chips_and_device_id()[0] > 0,
    }
    return tuple(kind for kind, is_there in has.items() if is_there)


def has_chip() -> bool:
    """Returns True if the machine has an NVIDIA GPU or a TPU."""
    return bool(attached_kinds())


def is_installed(platform: str) -> bool:
    """Returns True if the compiler of a platform is installed."""
    return any(map(_is_there, COMPILERS[platform][0]))


@cache  # the first declaration decides: a command that needs no device keeps JAX away from accelerators
def automatic() -> tuple[str, str]:
    """Returns the target that `target=auto` is on this machine, and why."""
    wanted = _platforms()
    if wanted and not set(wanted.split(",")) & {"cuda", "gpu", "tpu"}:
        return SIMULATED, f"JAX_PLATFORMS is {wanted}"
    found = attached_kinds()
    if any(map(is_installed, found)):
        return LOCAL, "attached"
    if found:
        _, extra, library = COMPILERS[found[0]]
        return (
            SIMULATED,
            f"a {found[0].upper()} is attached, and {library} is not installed: pip install 'meshloom[{extra}]'",
        )
    return SIMULATED, "no accelerator is attached"


def _platforms() -> str:
    """Returns the platforms that JAX may use, as the environment or the program says; "" for all."""
    jax = sys.modules.get("jax")
    return (jax.config.jax_platforms if jax else os.environ.get("JAX_PLATFORMS")) or ""


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # its parent package is not installed
        return False
