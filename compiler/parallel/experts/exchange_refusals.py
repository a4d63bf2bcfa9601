"""Why an exchange of tokens is not used, by the compiler of the target and by where the experts' devices lie."""

from functools import partial

from ..operation import OpInputs, Refusal
from .dispatch import Experts
from .expert_exchange import DEDUPLICATED


def why_not_ragged(inputs: OpInputs, experts: Experts) -> str | None:
    """Returns why the experts' axes use no ragged all-to-all; None where they do."""
    target = inputs.target
    most = target.compiler.max_chips_ragged_all_to_all
    if not target.compiler.ragged_all_to_all:
        return f"the compiler for {target.name} has no ragged all-to-all"
    if target.compiler.ragged_hides_less:
        slower = "hides fewer other collectives next to a ragged all-to-all, so the step is longer"
        return f"the compiler for {target.name} {slower} (docs/results/experts.md)"
    if most is not None and target.num_chips > most:
        return f"the compiler for {target.name} has no ragged all-to-all on more than {most} chips"
    return _over_several_axes(experts)


def nodes_of(experts: Experts, inputs: OpInputs) -> tuple[int, Refusal | None]:
    """Returns the number of nodes in which the devices along the experts' axis lie, as many in each, and None; or 1 and
    why no exchange goes over nodes first. Simulated devices have no nodes: they stand for two, where it is named."""
    no_nodes = partial(Refusal, instead=DEDUPLICATED)
    if why := _over_several_axes(experts):
        return 1, no_nodes(why)
    (axis,), placement, name = experts.axes, inputs.mesh.placement, inputs.target.name
    if not placement.is_known and experts.num_devices % 2 == 0:
        return 2, Refusal("simulated devices have no nodes; by name, they stand for two", is_hard=False)
    spans = {part.physical: part.size for part in placement.parts.get(axis, ())}
    if set(spans) == {"NIC", "NVLink"}:
        return spans["NIC"], None
    if "NIC" in spans:
        return 1, no_nodes(f"each device along {axis} is in another node of {name}: there is no step within a node")
    if "NVLink" in spans:
        return 1, no_nodes(f"the devices along {axis} are in one node of {name}: there is no step over nodes")
    return 1, no_nodes(f"the devices of {name} along {axis} are not in equal nodes, each with a switch")


def _over_several_axes(experts: Experts) -> str | None:
    several = f"the experts are split over several mesh axes, {' and '.join(experts.axes)}"
    return several if len(experts.axes) > 1 else None
