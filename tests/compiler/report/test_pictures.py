"""The pictures of a pipeline's table and of the chips of a mesh: what is drawn where, and what is left out."""

import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from conftest import plan_of
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.pipeline.makespan import time_table
from meshloom.compiler.pipeline.schedules import SCHEDULES, build_table
from meshloom.compiler.pipeline.table import TickForm
from meshloom.compiler.report.views.page import plan_table, render_page
from meshloom.compiler.report.views.pictures import (
    CELL,
    LEFT,
    MOST_PANELS,
    MOST_ROWS,
    MOST_STAGES,
    MOST_WIDTH,
    MeshPicture,
    mesh_picture,
    pipeline_picture,
)
from meshloom.compiler.target.placement import Placement
from support import reports
from support.browser import CHROMIUM, chromium
from support.placements import placed

SVG = "{http://www.w3.org/2000/svg}"


def drawn(text):
    """Returns the rectangles of operations by row: beginning, end, kind, title. And all texts."""
    rows = defaultdict(list)
    root = ElementTree.fromstring(text)
    for rect in root.iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None:
            begin, width = float(rect.attrib["x"]) - LEFT, float(rect.attrib["width"])
            rows[int(rect.attrib["y"])].append((begin, begin + width, rect.attrib["class"], title.text or ""))
    return [sorted(rows[y]) for y in sorted(rows)], [each.text or "" for each in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("form", TickForm)
def test_each_operation_is_drawn_on_its_stage_in_its_order(name, form):
    table = build_table(name, 2, SCHEDULES[name].num_chunks or 2, 4, form, recomputes=form == TickForm.UNIT)
    rows, texts = drawn(pipeline_picture(table))
    for stage, row in enumerate(rows):
        expected = [(f"op-{slot.op.lower()}", f"tick {tick}: {slot}") for tick, s, slot in table.slots() if s == stage]
        assert [each[2:] for each in row] == expected
        assert all(before[1] <= after[0] for before, after in pairwise(row))
    numbers = [each for each in texts if each.isdigit()]
    assert sorted(numbers) == sorted(str(slot.microbatch) for _, _, slot in table.slots())


def test_lengths_are_those_of_seconds_where_they_are_known():
    table = build_table("1f1b", 4, 1, 8, TickForm.MULTI)
    time = time_table(table, lambda op, stage, chunk: {"F": 2e-3, "BW": 3e-3, "R": 1e-3}[op] * (1 + stage), 1e-3)
    rows, texts = drawn(pipeline_picture(table, time))
    for stage, row in enumerate(rows):
        own = [slot for slot in time.slots if slot.stage == stage]
        scale = row[-1][0] / own[-1].begin
        assert [each[0] for each in row] == pytest.approx([slot.begin * scale for slot in own], abs=0.1)
        assert [end - begin for begin, end, *_ in row] == pytest.approx(
            [(slot.end - slot.begin) * scale - 0.8 for slot in own], abs=0.2
        )
    assert rows[3][0][3] == "tick 3: F of microbatch 0 in chunk 0, 8.00 ms"
    assert any("bubble" in text and " ms; " in text for text in texts)
    assert "took alike" not in " ".join(texts)


def test_the_bubble_is_that_of_the_table():
    """Eight microbatches on four stages: 3 of 11."""
    _, texts = drawn(pipeline_picture(build_table("1f1b", 4, 1, 8, TickForm.MULTI)))
    assert "as if all operations took alike, and BW twice; bubble 27.3 % of the time" in texts


def test_the_middle_of_a_long_table_is_left_out_and_said_so():
    table = build_table("1f1b", 8, 1, 300, TickForm.MULTI)
    text = pipeline_picture(table)
    rows, texts = drawn(text)
    assert max(end for row in rows for _, end, *_ in row) <= MOST_WIDTH
    ticks = {int(title.split(":")[0].removeprefix("tick ")) for row in rows for *_, title in row}
    (note,) = (each for each in texts if "left out" in each)
    hidden = sorted(set(range(table.num_ticks)) - ticks)
    assert note.endswith(f"the middle, ticks {hidden[0]} to {hidden[-1]} of {table.num_ticks}, is left out")
    assert {0, table.num_ticks - 1} <= ticks
    assert len(text) < 60_000


def test_of_many_stages_the_last_are_left_out_and_said_so():
    rows, texts = drawn(pipeline_picture(build_table("gpipe", 40, 1, 4, TickForm.MULTI)))
    assert len(rows) == MOST_STAGES
    assert any("8 more stages left out" in text for text in texts)


def test_the_name_of_a_users_schedule_is_text():
    table = replace(build_table("gpipe", 2, 1, 2, TickForm.MULTI), name='<b>"&')
    assert ElementTree.fromstring(pipeline_picture(table)).attrib["aria-label"].startswith('<b>"&: 2 stages')


@pytest.fixture(scope="module")
def plan():
    return plan_of("mesh.stage=4", "num_microbatches=8", "model.num_layers=4", "target=v5p-16", "data=synthetic")


def test_the_page_shows_the_table_of_the_plan_with_styles_of_its_own_sheet(plan):
    page = render_page(*reports.fits(), plan)
    (picture,) = re.findall(r'<svg class="pipeline".*?</svg>', page, re.S)
    assert plan.pipeline.how in page
    assert '<a href="#pipeline">' in page
    assert "<style" not in picture
    assert "style=" not in picture
    assert ".pipeline .op-f" in page
    rows, _ = drawn(picture)
    assert len(rows) == 4
    assert sum(map(len, rows)) == sum(1 for _ in plan.pipeline.table.slots())


@pytest.mark.ci
def test_a_notebook_shows_the_table_of_the_plan(plan):
    shown = plan_table(plan, estimate_step(plan))
    assert "<style" in shown.partition('<svg class="pipeline"')[2]


@pytest.mark.ci
@pytest.mark.skipif(not CHROMIUM, reason="there is no chromium: apt-get install chromium")
def test_a_browser_draws_the_table_in_its_colours(plan, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(render_page(*reports.fits(), plan))
    with chromium() as browser:
        browser.open(path)
        fill = "getComputedStyle(document.querySelector('.pipeline .op-f')).fill"
        assert browser.js(fill) == "rgb(0, 114, 178)"
        assert browser.errors == []


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
