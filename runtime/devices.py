"""The devices of this process, set up before JAX looks for them."""

import jax

from meshloom.compiler.problems import ConfigError, Problem
from meshloom.compiler.spec import TargetSpec

MOST_SIMULATED = 256  # each simulated device is a thread with its own memory


def plan_without_devices(target: TargetSpec) -> None:
    """Keep JAX away from accelerators, whose start takes seconds; `local` alone has to see them."""
    if target.kind == "cpu":
        jax.config.update("jax_platforms", "cpu")


def start_devices(target: TargetSpec) -> None:
    """Simulate the devices of a cpu target. Raises ConfigError for more than one can sensibly simulate."""
    if target.kind != "cpu":
        return
    num_devices = target.num_devices or 1
    if num_devices > MOST_SIMULATED:
        what = f"{num_devices} simulated devices are too many to run on one machine"
        raise ConfigError([Problem("target", what, f"plan them with `meshloom explain`, run at most cpu-{MOST_SIMULATED}")])  # fmt: skip  # noqa: E501
    jax.config.update("jax_platforms", "cpu")
    if jax.config.jax_num_cpu_devices != num_devices:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_num_cpu_devices", num_devices)
