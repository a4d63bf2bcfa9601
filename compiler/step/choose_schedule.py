"""Chooses the layer schedule that runs a plan."""

from functools import partial

from ..plan import Plan
from .prefetch import prefetch_layers
from .scan import scan_layers
from .schedule import LayerSchedule
from .sequential import SequentialSchedule


def choose_schedule(plan: Plan) -> LayerSchedule:
    """Returns the schedule that the plan declares, with the loop over layers that it declares."""
    loop = plan.spec.overlap.layers
    scan = partial(scan_layers, unroll=loop.unroll)
    is_synchronous = plan.target.compiler.synchronous_collectives
    prefetch = partial(prefetch_layers, loop=loop, skip_boundary_collectives=is_synchronous)
    return SequentialSchedule(
        prefetch if loop.prefetch else scan,
        num_microbatches=plan.spec.num_microbatches,
        reduce_in_backward=loop.reduce_in_backward,
    )
