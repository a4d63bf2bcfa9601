"""The picture of the chips, against the mesh: which device lies where, and which axes it shares with the first."""

import pytest

from conftest import plan_of
from meshloom.compiler.report.views.pictures import CELL, MOST_PANELS, MOST_ROWS, MeshPicture, mesh_picture
from meshloom.compiler.target.placement import Placement
from support.placements import placed

# Sizes of the mesh; the places of a chip's coordinates: across, down, and which panel.
MESHES = {
    "v5p-128": ({"fsdp": 16, "tensor": 4}, (1, 2, 3)),
    "v5e-64": ({"fsdp": 16, "tensor": 4}, (1, 2, None)),
    "v5e-16": ({"fsdp": 16}, (1, 2, None)),
    "v5e-256": ({"fsdp": 32, "tensor": 8}, (1, 2, None)),
    "h100-64": ({"fsdp": 8, "tensor": 8}, (1, 0, None)),
    "v6e-16": ({"num_slices": 2, "replica": 2, "fsdp": 16}, (1, 2, 0)),
}


def picture_of(target: str, **sizes: int) -> tuple[Placement, MeshPicture]:
    placement = placed(target, **sizes)
    picture = mesh_picture(placement)
    assert picture
    return placement, picture


@pytest.mark.parametrize("target", MESHES)
def test_each_chip_has_the_colour_of_the_axis_that_it_shares_with_the_first(target):
    sizes, (across, down, outer) = MESHES[target]
    placement, picture = picture_of(target, **sizes)
    names = {colour: axis for axis, _, _, colour in picture.axes}
    device_at = {place: device for device, place in enumerate(placement.places)}
    found = []
    for panel, drawn in enumerate(picture.panels):
        for cell in drawn.cells:
            (device,) = [
                device for place, device in device_at.items()
                if (place[across], place[down]) == (cell.x // CELL, cell.y // CELL)
                and (outer is None or place[outer] == panel)
            ]  # fmt: skip
            axes = placement.axes_of([0, device])
            assert axes == (() if cell.colour == "first" else (names[cell.colour],))
            found.append(device)
    assert len(found) == len(set(found)) == 1 + sum(size - 1 for _, size, _, _ in picture.axes)
    assert (picture.num_panels_left_out, picture.num_rows_left_out) == (0, 0)


def test_what_is_too_large_says_what_it_leaves_out():
    placement, pod = picture_of("v5p-12288", fsdp=6144)
    assert placement.target.shape == (16, 16, 24)
    assert (len(pod.panels), pod.num_panels_left_out) == (MOST_PANELS, 24 - MOST_PANELS)
    _, nodes = picture_of("h100-512", fsdp=512)
    assert (nodes.height, nodes.num_rows_left_out) == (MOST_ROWS * CELL, 64 - MOST_ROWS)


def test_devices_of_unknown_links_have_no_picture():
    assert mesh_picture(plan_of().mesh.placement) is None
