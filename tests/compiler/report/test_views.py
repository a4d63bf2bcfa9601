"""The terminal summary, the timeline's format, and the facts that all views tell."""

import io
import json
import re
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from conftest import LINEAR_STACK, plan_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.format import (
    human_bytes,
    human_count,
    human_parameters,
    human_seconds,
    human_share,
    signed_share,
    three_digits,
)
from meshloom.compiler.core.known import Unknown, why_unknown
from meshloom.compiler.core.traffic import TrafficSource
from meshloom.compiler.report.explain import plan_as_json
from meshloom.compiler.report.views.charts import memory_bar
from meshloom.compiler.report.views.facts import sums, unknown_values, verdict, why_exposed
from meshloom.compiler.report.views.page import TOO_SMALL, compact_timeline, render_page
from meshloom.compiler.report.views.summary import show_summary
from meshloom.compiler.report.views.timeline import by_stage, chrome_trace
from meshloom.compiler.schema import Alternative, Event, Report, by_exposed
from meshloom.runtime.rundir.run_dir import write_report
from support import reports


@pytest.mark.parametrize("case", reports.CASES)
def test_a_report_survives_its_file(case):
    report, events = reports.CASES[case]()
    assert Report.model_validate_json(report.model_dump_json()) == report
    for event in events[:20]:
        assert Event.model_validate_json(event.model_dump_json()) == event


def _summary(report: Report, *, width: int = 100) -> str:
    out = io.StringIO()
    show_summary(report, Console(out, width=width), files=())
    return out.getvalue()


@pytest.mark.parametrize("case", reports.CASES)
def test_the_summary_is_one_screen(case):
    lines = _summary(reports.CASES[case]()[0]).splitlines()
    assert len(lines) <= 40


@pytest.mark.parametrize("case", reports.CASES)
@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_all_that_a_file_does_between_its_edges(case, width):
    """Words of a table are in another order, where cells wrap."""
    out = io.StringIO()
    show_summary(reports.CASES[case]()[0], Console(out, width=width, is_terminal=True), files=())
    lines = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).splitlines()
    assert max(map(len, lines)) <= width
    told = "".join("".join(lines).split())
    in_file = _summary(reports.CASES[case]()[0])
    assert sorted(told) == sorted("".join(in_file.split()))
    assert "…" not in told + in_file


def test_the_summary_is_one_screen_whatever_there_is_to_say():
    report, long = reports.does_not_fit()[0], TrafficSource(activation="x" * 300)
    report = report.model_copy(
        update={
            "collectives": tuple(replace(c, origin=long, exposed_seconds=1.0, is_async=True,
                                         hidden_seconds=1.0, hidden_behind=("y" * 300,))
                                 for c in (*report.collectives, *reports.gpu()[0].collectives)),
            "findings": report.findings * 20,
            "memory": report.memory.model_copy(update={"changes": report.memory.changes * 9}),
            "target": report.target.model_copy(update={"hbm_bytes_per_second": Unknown("z" * 300)}),
        }
    )  # fmt: skip
    lines = _summary(report).splitlines()
    assert len(lines) <= 40
    assert any("more" in line for line in lines)


def test_collectives_of_one_source_and_reason_are_one_line():
    report = reports.fits()[0]
    alike = {"origin": TrafficSource(), "is_async": False, "form": "synchronous", "exposed_seconds": 0.01}
    collectives = tuple(replace(c, kind="all-reduce", **alike) for c in report.collectives[:7])
    text = _summary(report.model_copy(update={"collectives": collectives}))
    assert re.search(r"70\.0 ms +all-reduce: made by the compiler \(7 places\) +compute waits for all of it", text)


def test_a_faster_declaration_that_fits_has_a_line():
    """remat=none is shorter still, and does not fit; what is a percent shorter is no news."""
    report = reports.fits()[0]
    own, faster, _ = report.alternatives
    seconds = [one.figures.step_seconds or 0.0 for one in report.alternatives]
    assert [one.figures.fits for one in report.alternatives] == [True, True, False]
    assert seconds[2] < seconds[1] == pytest.approx(0.9 * seconds[0])
    assert "\nfaster   remat=save_dots: 10.0 % shorter, 11.2 GiB, both estimated\n" in _summary(report)
    figures = faster.figures.model_copy(update={"step_seconds": 0.99 * seconds[0]})
    close = faster.model_copy(update={"figures": figures})
    for others in ((own, close), (own,), ()):
        assert "faster" not in _summary(report.model_copy(update={"alternatives": others}))


def test_experts_with_room_for_any_imbalance_lead_with_the_expected_step():
    report, events = reports.fits()
    own = report.alternatives[0]
    half = (own.figures.step_seconds or 0.0) / 2
    usual = Alternative(
        overrides=("moe.max_imbalance=1.25",), figures=own.figures.model_copy(update={"step_seconds": half})
    )
    with_experts = report.model_copy(update={"alternatives": (*report.alternatives, usual)})
    names = [fact.name for fact in verdict(with_experts)]
    assert names[1:3] == ["expected step", "step as compiled"]
    assert names[3:] == [fact.name for fact in verdict(report)][2:]
    first = _summary(with_experts, width=1000).splitlines()[0]
    expected, compiled = human_seconds(half), human_seconds(report.compiled.step_seconds or 0.0)
    assert f"expected step {expected} (estimated, moe.max_imbalance=1.25) · as compiled, for any" in first
    assert f"imbalance of experts: step {compiled} (" in first
    assert "max_imbalance" not in "".join(_summary(with_experts, width=1000).splitlines()[1:]), "it may drop tokens"
    page = render_page(with_experts, events)
    assert page.index(">expected step</h2>") < page.index(">step as compiled</h2>")
    assert "with room for any imbalance of experts; " in page


def test_a_file_has_lines_of_full_width():
    assert _summary(reports.fits()[0], width=80) == _summary(reports.fits()[0])


def test_the_verdict_comes_first():
    first = {case: _summary(make()[0]).splitlines()[0] for case, make in reports.CASES.items()}
    step = reports.fits()[0].compiled.step_seconds
    assert step
    assert round(512 * 4096 / step / 256) == 2779, "512 sequences of 4,096 tokens on 256 chips"
    of_step = "step 2.95 s (2.68 to 3.24 s) · 2,779 tokens/s per chip · MFU 61.3 % · exposed 3.5 %"
    assert first["fits"] == f"fits: 7.2 GiB of 15.8 GiB · {of_step}"
    assert first["does not fit"].startswith("does not fit: 41.0 GiB of 15.8 GiB · step 2.95 s")
    assert first["offloaded"] == (f"fits: 7.2 GiB of 15.8 GiB · host 20.0 GiB of 44.7 GiB · {of_step}")
    assert first["unknowns"] == "memory 7.2 GiB, limit unknown · step unknown · MFU unknown · exposed unknown"


def test_memory_of_the_host_is_compared_with_the_hosts_own():
    report = reports.offloaded()[0]

    def told(**update) -> str:
        return _summary(reports.with_figures(report, **update)).splitlines()[0]

    assert " · host does not fit: 20.0 GiB of 9.3 GiB · " in told(host_limit_bytes=10**10, host_fits=False)
    unknown = dict.fromkeys(("host_limit_bytes", "host_fits"), Unknown("not described"))
    assert " · host memory 20.0 GiB, limit unknown · " in told(**unknown)
    assert "host" not in told(**unknown, host_bytes=0)


def test_a_summary_shows_names_as_they_are():
    report = reports.fits()[0]
    finding = report.findings[0].model_copy(update={"what": "[bold]x[/] and [/y] :smile:"})
    report = report.model_copy(update={"findings": (finding,), "collectives": tuple(
        replace(c, origin=TrafficSource(activation="[red]rules[0]")) for c in report.collectives)})  # fmt: skip
    text = _summary(report)
    assert "[bold]x[/] and [/y] :smile:" in text
    assert ": [red]rules[0]" in text


def test_unknown_values_tell_why():
    report = reports.unknowns()[0]
    reasons = dict(unknown_values(report))
    assert reasons["compiled.mfu"] == why_unknown(report.compiled.mfu)
    assert reasons["collectives[*].alone_seconds"] == why_unknown(report.collectives[3].alone_seconds)
    assert reasons["memory.breakdown.reserved"] == "nothing is reserved on a host"
    assert "build.plugin" not in reasons
    assert not dict(unknown_values(reports.fits()[0]))
    assert [fact.tone for fact in verdict(report)] == ["unknown"] * 4


def test_a_step_that_is_not_whole_is_a_lower_bound_in_each_view():
    report, events = reports.fits()
    why = "the time of all-gather.7 is not known, and the step is longer by it: the program does not name its group"
    names = ("step_seconds", "range_factor", "mfu", "exposed_seconds", "exposed_fraction")
    step = report.compiled.model_copy(update=dict.fromkeys(names, Unknown(why)) | {"least_seconds": 1.5})
    report = report.model_copy(update={"compiled": step})
    report = Report.model_validate_json(report.model_dump_json())
    text = _summary(report)
    assert "step at least 1.50 s" in text.splitlines()[0]
    once = report.model_copy(update={"compiled": step.model_copy(update={"counted_once": ("while.3",)})})
    assert "step at least 1.50 s per iteration of while.3" in _summary(once).splitlines()[0]
    assert text.count("at least 1.50 s") == 2  # the verdict and the bar
    assert why in text
    page = render_page(report, events)
    assert "at least 1.50 s" in page
    assert page.count(why) >= 2


def test_a_pipelines_bubble_is_shown_beside_what_is_exposed():
    report, events = reports.fits()
    assert "bubble" not in _summary(report)
    whole = report.compiled.step_seconds or 0.0
    found = {"step_seconds": 1.25 * whole, "bubble_seconds": 0.25 * whole, "bubble_fraction": 0.2}
    report = report.model_copy(update={"compiled": report.compiled.model_copy(update=found)})
    assert "bubble 20" in _summary(report)
    assert "waits for other stages" in render_page(report, events)


def test_what_has_unknown_flops_is_shown_as_unknown():
    """A step with a kernel that nobody can count: no number, and the same reason in each view."""
    report, events = reports.fits()
    why = "pallas_call my_kernel at models.py:12, in layers: the kernel has no cost estimate"
    unknown = Unknown(why)
    figures = dict.fromkeys(("flops", "hbm_bytes", "flops_seconds", "hbm_seconds"), unknown) | {"bound": None}
    report = report.model_copy(update={
        "program": report.program.model_copy(update={"model_flops_per_step": unknown}),
        "compiled": report.compiled.model_copy(update={"mfu": unknown, "roofline_seconds": unknown}),
        "roofline": (report.roofline[0].model_copy(update=figures), *report.roofline[1:]),
    })  # fmt: skip
    report = Report.model_validate_json(report.model_dump_json())
    assert set(dict(unknown_values(report)).values()) == {why}
    assert "pallas_call my_kernel at models.py:12" in _summary(report)
    page = render_page(report, events, reports.llama_plan())
    assert page.count(why) >= 4
    assert "None" not in page.partition('id="roofline"')[2].partition("</section>")[0]


def test_each_exposed_collective_says_why():
    for make in reports.CASES.values():
        for c in make()[0].collectives:
            assert bool(why_exposed(c)) == bool(c.exposed_seconds)
    first = reports.fits()[0].collectives[0]
    nearly = replace(first, is_async=True, hidden_seconds=4e-17, exposed_seconds=1e-3, hidden_behind=())
    assert why_exposed(nearly) == "nothing runs between its start and its end", "what rounding leaves hides nothing"
    worst = by_exposed(reports.fits()[0].collectives)
    assert worst[0].exposed_seconds == max(c.exposed_seconds or 0 for c in worst)
    assert not by_exposed(reports.unknowns()[0].collectives)[0].exposed_seconds


def test_sums_lose_nothing():
    collectives = reports.gpu()[0].collectives
    rows = sums(collectives)
    assert len(rows) == len({(c.kind, c.mesh_axes, c.link) for c in collectives})
    assert sum(row.bytes for row in rows) == sum(c.bytes for c in collectives)
    assert sum(row.exposed_seconds or 0 for row in rows) == pytest.approx(sum(c.exposed_seconds or 0 for c in collectives))  # fmt: skip  # noqa: E501
    assert isinstance(sums(reports.unknowns()[0].collectives)[0].exposed_seconds, Unknown)


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (human_seconds(0), "0 s"), (human_seconds(2.9482), "2.95 s"), (human_seconds(0.9999), "1.00 s"),
        (human_seconds(0.0321), "32.1 ms"), (human_seconds(1.6e-5), "16.0 µs"), (human_seconds(2e-9), "2.00 ns"),
        (human_seconds(4e-16), "0 s"),
        (human_seconds(1234.5), "1,230 s"), (human_share(0.0405), "4.0 %"), (human_share(1e-5), "< 0.1 %"),
        (human_share(0), "0.0 %"), (human_count(197e12, "FLOP/s"), "197 TFLOP/s"), (human_count(0.002), "0.00200"),
        (human_parameters(6_738_415_616), "6.74 B"), (human_parameters(923_000), "923 k"),
        (three_digits(99.96), "100"), (three_digits(9.996), "10.0"),
        (human_seconds(2.9512), "2.95 s"), (signed_share(-0.0812), "-8.1 %"),
        (human_bytes(0), "0 B"), (human_bytes(1023), "1023 B"),
        (human_bytes(1536), "1.5 KiB"), (human_bytes(5 * 2**40), "5.0 TiB"),
    ],
)  # fmt: skip
def test_numbers_as_people_read_them(told, text):
    assert told == text


# The format: "Trace Event Format", Google, sections "Complete Events", "Flow Events", "Metadata Events".


@pytest.mark.parametrize("case", reports.CASES)
def test_the_timeline_is_in_chromes_format(case):
    trace = chrome_trace(*reports.CASES[case]())
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named = {row["tid"] for row in trace["traceEvents"] if row["name"] == "thread_name"}
    for row in trace["traceEvents"]:
        assert row["pid"] == 1
        assert isinstance(row["name"], str)
        if row["ph"] == "M":
            assert row["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
        else:
            assert row["ph"] in ("X", "s", "f")
            assert row["tid"] in named
            assert row["ts"] >= 0
        if row["ph"] == "X":
            assert row["dur"] >= 0
            assert isinstance(row["args"], dict)


def _slices(trace):
    """(start ns, end ns, slice) by thread."""
    threads = defaultdict(list)
    for row in trace["traceEvents"]:
        if row["ph"] == "X":
            start, length = round(1e3 * row["ts"]), round(1e3 * row["dur"])
            threads[row["tid"]].append((start, start + length, row))
    return {thread: sorted(rows, key=lambda row: row[:2]) for thread, rows in threads.items()}


def overlapping() -> tuple[Event, ...]:
    """Three collectives at once on one link, beside two matmuls with a pause."""

    def event(track, kind, name, start, seconds):
        return Event(track=track, name=name, kind=kind, start_seconds=start, seconds=seconds, arguments={})

    return (
        event("ICI x", "all-gather", "a", 0.0, 3e-3), event("ICI x", "all-gather", "b", 1e-3, 3e-3),
        event("ICI x", "reduce-scatter", "c", 2e-3, 3e-3), event("ICI x", "all-gather", "d", 3e-3, 1e-3),
        event("compute", "matmul", "m", 0.5e-3, 1e-3), event("compute", "matmul", "n", 2.5e-3, 9e-3),
    )  # fmt: skip


@pytest.mark.parametrize("events", [reports.fits()[1], reports.gpu()[1], overlapping()])
def test_no_slices_of_a_thread_overlap_and_none_is_lost(events):
    threads = _slices(chrome_trace(reports.fits()[0], events))
    assert sum(map(len, threads.values())) == len(events)
    for rows in threads.values():
        for (_, end, _), (start, _, _) in pairwise(rows):
            assert start >= end
    told = sum(end - start for rows in threads.values() for start, end, _ in rows)
    assert told == pytest.approx(1e9 * sum(event.seconds for event in events), rel=1e-6)


def test_what_is_at_once_on_a_link_gets_lanes_and_compute_comes_first():
    trace = chrome_trace(reports.fits()[0], overlapping())
    lanes = [row["args"]["name"] for row in trace["traceEvents"] if row["name"] == "thread_name"]
    assert lanes == ["compute", "ICI x", "ICI x (2)", "ICI x (3)"]
    by_name = {row["name"]: row for row in trace["traceEvents"] if row["ph"] == "X"}
    assert by_name["a"]["args"] == {"hidden_us": 1500.0, "hidden_behind": ["m", "n"]}
    assert by_name["c"]["args"]["hidden_us"] == 2500.0


def test_each_stage_of_a_pipeline_is_a_process_with_its_own_hidden_time():
    """Stage 0 of twelve computes, stage 11 sends at the same time: nothing of that is hidden."""
    events = tuple(
        each.model_copy(update={"stage": stage})
        for stages, kinds in (((0, 1), ("matmul",)), ((10, 11), ("all-gather", "reduce-scatter")))
        for stage in stages
        for each in overlapping()
        if each.kind in kinds
    )
    rows = chrome_trace(reports.fits()[0], events)["traceEvents"]
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert [name.partition(" of ")[0] for name in names.values()] == ["stage 0", "stage 1", "stage 10", "stage 11"]
    assert all(name.endswith("; stages 2 to 9 are left out") for name in names.values())
    slices = [row for row in rows if row["ph"] == "X"]
    assert Counter(row["pid"] for row in slices) == {1: 2, 2: 2, 3: 4, 4: 4}
    assert {row["args"].get("hidden_us", 0) for row in slices} == {0}
    page = render_page(reports.fits()[0], events)
    assert "one chip of each stage but 2 to 9</h2>" in page
    assert compact_timeline(*by_stage(events))["lanes"][:3] == [
        "stage 0 compute", "stage 1 compute", "stage 10 ICI x",
    ]  # fmt: skip


def test_hidden_time_is_what_a_fine_grid_counts():
    """Against a count of instants at which a collective and compute both run."""
    for row in chrome_trace(reports.gpu()[0], overlapping())["traceEvents"]:
        if row["ph"] == "X" and row["cat"] in ("all-gather", "reduce-scatter"):
            instants = [us for us in range(0, 12_000, 2) if row["ts"] <= us < row["ts"] + row["dur"]]
            assert row["args"]["hidden_us"] == 2 * sum(500 <= us < 1500 or 2500 <= us < 11_500 for us in instants)


def test_arrows_lead_from_a_collective_to_the_compute_that_hides_it():
    report, events = reports.fits()
    trace = chrome_trace(report, events)
    threads = _slices(trace)
    ends = defaultdict(dict)
    for row in trace["traceEvents"]:
        if row["ph"] in "sf":
            ends[row["id"]][row["ph"]] = row
    assert len(ends) > 100
    for pair in list(ends.values())[::10]:
        kinds = {}
        for phase, row in pair.items():
            within = [e for start, end, e in threads[row["tid"]] if start <= round(1e3 * row["ts"]) < end]
            assert len(within) == 1, "both ends lie in one slice"
            kinds[phase] = within[0]
        assert kinds["f"]["cat"] in ("matmul", "attention", "other")
        assert kinds["f"]["name"] in kinds["s"]["args"]["hidden_behind"]


def test_a_plot_that_is_not_there_has_words_as_its_reason():
    """Peak and roofline are known, and no part computes."""
    report = reports.fits()[0]
    idle = tuple(part.model_copy(update={"flops": 0}) for part in report.roofline)
    page = render_page(report.model_copy(update={"roofline": idle}), ())
    assert not isinstance(report.compiled.roofline_seconds, Unknown)
    assert f'No plot: <span class="unknown" tabindex="0" title="{TOO_SMALL}">' in page


def test_the_three_files_are_written_and_say_the_same(tmp_path):
    report, events = reports.fits()
    paths = write_report(report, reports.llama_plan(), tmp_path, events=events)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json", "timeline.json"]
    assert set(paths) == set(tmp_path.iterdir())
    assert Report.model_validate_json((tmp_path / "report.json").read_text()) == report
    assert json.loads((tmp_path / "timeline.json").read_text()) == chrome_trace(report, events)
    page = (tmp_path / "report.html").read_text()
    embedded = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.S)
    assert embedded
    assert json.loads(embedded[1]) == reports.in_page(report)
    again = {path.name: path.read_bytes() for path in paths}
    write_report(report, reports.llama_plan(), tmp_path, events=events)
    assert again == {path.name: path.read_bytes() for path in paths}, "the same report gives the same bytes"


def test_memory_bars_name_every_class():
    report, _ = reports.fits()
    breakdown = {
        "parameters": 3 * 2**30,
        "gathered_weights": 2 * 2**30,
        "gradients": 2**30,
        "activations": Unknown("not told apart"),
    }
    report = report.model_copy(update={"memory": report.memory.model_copy(update={"breakdown": breakdown})})
    bar = memory_bar(report)
    assert [each.name for each in bar.segments][:3] == ["parameters", "gathered weights", "gradients"]
    assert len({each.colour for each in bar.segments[:3]}) == 3
    assert bar.missing == ("activations",)
    assert "gathered weights 2.0 GiB" in _summary(report)


@pytest.mark.parametrize("case", ["fits", "does not fit"])
def test_the_memory_bar_is_the_whole_chip(case):
    """What is left lies between what is taken and what is reserved; there is none where the step does not fit."""
    report = reports.CASES[case]()[0]
    bar = memory_bar(report)
    by_name = {each.name: each for each in bar.segments}
    assert [each.name for each in bar.segments][-1] == "reserved"
    assert ("left" in by_name) == (report.compiled.fits is True)
    limit = next(mark for mark in bar.marks if mark.name == "limit")
    if report.compiled.fits:
        assert by_name["left"].start + by_name["left"].width == pytest.approx(limit.at)
        assert by_name["left"].value in verdict(report)[0].detail
        assert bar.segments[-1].start + bar.segments[-1].width == pytest.approx(100, abs=2)


STEP = {"compute_seconds", "exposed_seconds", "exposed_fraction", "predicted_seconds", "predicted_mfu",
        "predicted_range_seconds", "roofline_seconds"}  # fmt: skip
MEMORY = {"peak_bytes_per_chip", "limit_bytes_per_chip", "fits", "breakdown", "estimate_bytes_per_chip"}


def test_a_report_has_them_and_is_read_without_them():
    report = reports.does_not_fit()[0]
    written = json.loads(report.model_dump_json())
    assert written["step"].keys() >= STEP
    assert written["memory"].keys() >= MEMORY
    assert (written["memory"]["peak_bytes_per_chip"], written["memory"]["fits"]) == (41 * 2**30, False)
    assert written["step"]["predicted_seconds"] == pytest.approx(
        sum(written["step"][part] for part in ("compute_seconds", "exposed_seconds", "bubble_seconds"))
    )
    shortest, longest = written["step"]["predicted_range_seconds"]
    assert shortest * longest == pytest.approx(written["step"]["predicted_seconds"] ** 2)
    assert written["alternatives"][0]["seconds"] > 0
    assert Report.model_validate_json(report.model_dump_json()) == report


def test_those_that_are_unknown_have_their_reasons():
    written = json.loads(reports.unknowns()[0].model_dump_json())
    nulls = [name for name in STEP if written["step"][name] is None]
    assert {"predicted_seconds", "predicted_mfu", "predicted_range_seconds"} <= set(nulls)
    assert all(written["unknown"].get(f"step.{name}") for name in nulls)


@pytest.mark.parametrize("target", ["v5e-8", "cpu-8"])
def test_a_plan_has_them(target):
    plan = plan_of(*LINEAR_STACK, f"target={target}", "sharding=fsdp", "precision=bfloat16")
    written = plan_as_json(plan)
    time, memory = (written["estimate"][name] for name in ("time", "peak_memory_bytes_per_device"))
    if target == "cpu-8":
        assert (time, memory["fits"]) == (None, None)
        assert written["unknown"].keys() >= {"estimate.time", "estimate.peak_memory_bytes_per_device.fits"}
    else:
        waits = sum(time["exposed_seconds"].values()) + time["bubble_seconds"]
        assert time["seconds"] == pytest.approx(time["compute_seconds"] + waits)
        assert memory["fits"]
        assert memory["peak_bytes"] < memory["limit_bytes"]


def test_programs_that_were_tried_say_whether_they_fit_in_both_memories_and_why_they_have_no_step():
    search = reports.searched()
    first, second, *others = search.tried
    second = second.model_copy(update={"figures": second.figures.model_copy(update={"host_fits": False})})
    report = reports.fits()[0].model_copy(
        update={"search": search.model_copy(update={"tried": (first, second, *others)})}
    )
    text = report.model_dump_json()
    tried = json.loads(text)["search"]["tried"]
    assert [one["fits"] for one in tried[:2]] == [first.figures.fits, False]
    whys = [one.figures.step_seconds for one in search.tried]
    assert [one["why_not"] for one in tried] == [each.why if isinstance(each, Unknown) else None for each in whys]
    assert Report.model_validate_json(text) == report
