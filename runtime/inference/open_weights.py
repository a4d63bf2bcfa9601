"""Opens the weights alone of a declaration, on any mesh: no optimizer state, no gradients.

    plan = plan_weights(spec)                  Plan, checked against the checkpoint's arrays, before devices are asked
    params = open_weights(plan, mesh, ...)     the parameters on the devices

The weights are those of `checkpoint.weights_from`: a run, one of its checkpoints, or published files.
"""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.plan import Plan

from ..checkpoint.parameters import find_saved, load_parameters
from ..checkpoint.shared_start import start_of_first
from ..checkpoint.start import describe_damage
from ..processes.distributed import Processes
from ..processes.process_log import say
from .run_request import PUBLISHED, WEIGHTS_FROM


def abstract_parameters(plan: Plan[RunSpec], mesh: Mesh) -> Any:
    """Returns the parameters of a plan as sharded ShapeDtypeStructs."""
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        plan.abstract["params"],
        plan.specs["params"],
    )


def open_weights(plan: Plan[RunSpec], mesh: Mesh, processes: Processes, console: Console) -> Any:
    """Returns the parameters of the weights that the declaration names, laid out as planned on the mesh.

    Says which checkpoint it reads. Raises ConfigError in all processes for weights of another model, and RunFailed if
    every checkpoint is damaged.
    """
    place = place_of_weights(plan.spec)
    if place.startswith(PUBLISHED):
        what = "is a folder of published weights, which this version cannot read yet"
        raise ConfigError([Problem(WEIGHTS_FROM, f"{place} {what}", "name a run directory")])
    start = start_of_first(lambda: find_saved(place, WEIGHTS_FROM), processes)
    assert start is not None
    if start.damaged:
        say(console, f"warning: damaged, so an older one is used: {describe_damage(start.damaged)}")
    say(console, f"weights: step {start.step} of {place}")
    return load_parameters(start, abstract_parameters(plan, mesh))


def place_of_weights(spec: RunSpec) -> str:
    """Returns the place of the declared weights. Raises ConfigError if there is none."""
    if spec.checkpoint.weights_from is None:
        fix = "set it to RUN, RUN/checkpoints/STEP or hf:DIR"
        raise ConfigError([Problem(WEIGHTS_FROM, "names no weights to open", fix)])
    return spec.checkpoint.weights_from
