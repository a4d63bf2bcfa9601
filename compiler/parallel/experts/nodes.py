"""The nodes over which the experts' devices lie: those of each node are behind one switch (NVLink)."""

from ..operation import OpInputs, Refusal
from .dispatch import Experts


def nodes_of(experts: Experts, inputs: OpInputs) -> tuple[int, Refusal | None]:
    """Returns the number of nodes over which the devices along the experts' axis lie, as many in each, and why no
    exchange goes over the nodes first; 1 with the reason, where it cannot. Simulated devices have no nodes: where an
    exchange is named, they stand for two."""
    if len(experts.axes) != 1:
        return 1, Refusal(f"the experts are split over several mesh axes, {' and '.join(experts.axes)}")
    (axis,), placement = experts.axes, inputs.mesh.placement
    if not placement.is_known:
        if experts.num_devices % 2:
            return 1, Refusal(f"{experts.num_devices} devices along {axis} cannot stand for two equal nodes")
        return 2, Refusal("simulated devices have no nodes; by name, they stand for two", is_hard=False)
    spans = {part.physical: part.size for part in placement.parts.get(axis, ())}
    if set(spans) == {"NIC", "NVLink"}:
        return spans["NIC"], None
    name = inputs.target.name
    if "NIC" in spans:
        return 1, Refusal(f"each device along {axis} is in another node of {name}: there is no step within a node")
    if "NVLink" in spans:
        return 1, Refusal(f"the devices along {axis} are in one node of {name}: there is no step over nodes")
    return 1, Refusal(f"the devices of {name} are not in nodes, each with a switch")
