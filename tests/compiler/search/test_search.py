"""`overlap.search`: which programs are compiled, in which order, and which is taken; flag presets and their data."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import jax
import pytest

from conftest import SMALL, plan_of
from meshloom.compiler.analysis.compiled_step import NO_PROGRAM, CompiledStep
from meshloom.compiler.analysis.schedule_analysis import ScheduleAnalysis
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.estimate.estimate import estimate_declared, estimate_step
from meshloom.compiler.estimate.step_time import plan_hiding
from meshloom.compiler.figures import StepFigures
from meshloom.compiler.plan import Plan
from meshloom.compiler.report.views.facts import unknown_values
from meshloom.compiler.report.views.page import render_page
from meshloom.compiler.report.views.summary import show_summary
from meshloom.compiler.schema import Report, TriedReport
from meshloom.compiler.search.candidates import FLAT, applied, best_of, could_gain, expected_wait, overlap_candidates
from meshloom.compiler.spec.flag_presets import preset_file
from meshloom.compiler.spec.overlap_spec import LayerLoop, OverlapConfig
from meshloom.compiler.target.compiler_options import (
    check_compiler_options,
    plan_preset_options,
    presets_for,
    refused_options,
)
from meshloom.compiler.target.topology import check_compiler, find_devices
from meshloom.compiler.xla.aot import Built, ProgramMemory, compile_ahead, lower_ahead
from meshloom.runtime.compile.step_compiler import StoredStep, search_overlap
from support import reports
from support.commands import meshloom
from support.programs import plan_as_declared
from support.reports import step_figures

V5P = ("target=v5p-128", "model=llama3_8b", "sharding=fsdp", "global_batch_size=64", "sequence_length=2048")
AHEAD = FLAT.model_copy(update={"unroll": 2, "prefetch": 1, "deferred_reduce_scatter": True})


def way(loop: LayerLoop, *flag_presets: str) -> OverlapConfig:
    return OverlapConfig(layers=loop, parallel={}, flag_presets=flag_presets)


def found(
    seconds: float | None, *, fits: bool | None = True, host_fits: bool | None = None, exposed: float | None = None
) -> StepFigures:
    given = {
        "step_seconds": seconds, "fits": fits, "host_fits": host_fits,
        "exposed_seconds": None if seconds is None or exposed is None else exposed * seconds,
    }  # fmt: skip
    return step_figures(**{name: value for name, value in given.items() if value is not None})


def tried(seconds: float | None, *presets: str, fits: bool | None = True, exposed: float | None = None) -> TriedReport:
    figures = found(seconds, fits=fits, exposed=exposed)
    return TriedReport(**dict(way(FLAT, *presets)), figures=figures, compile_seconds=1.0)


def test_the_shortest_step_that_fits_is_taken():
    assert best_of([found(2.0), found(1.0, fits=False), found(1.5), found(None), found(1.8)], None) == 2
    assert best_of([found(None), found(1.0, fits=False)], None) is None
    assert best_of([found(1.0, host_fits=False), found(2.0, host_fits=True)], None) == 1, "of the host's memory too"
    assert best_of([found(2.0, fits=None)], None) == 0, "a chip of unknown memory refuses nothing"


@pytest.mark.parametrize(("max_exposed", "place"), [(None, 1), (0.05, 1), (0.03, 2), (0.01, 1)])
def test_a_longer_step_is_taken_where_it_alone_meets_the_demand(max_exposed, place):
    exposed = (None, 0.04, 0.02, 0.03)
    steps = [found(seconds, exposed=share) for seconds, share in zip((6.4, 6.3, 6.5, 6.6), exposed, strict=True)]
    assert best_of(steps, max_exposed) == place


@pytest.mark.parametrize(
    ("compiled", "max_exposed", "could"),
    [
        ((tried(1.0, exposed=0.03),), None, True),  # it could hide 3 %
        ((tried(1.0, exposed=0.005),), None, False),
        ((tried(1.0, exposed=0.005),), 0.001, True),  # the demand is not met yet
        ((tried(1.2, exposed=0.3), tried(1.0, "sparse_core", exposed=0.0)), None, True),  # 0.84 s of arithmetic
        ((tried(1.2, exposed=0.1), tried(1.0, "sparse_core", exposed=0.0)), None, False),
        ((tried(1.0, "sparse_core", exposed=0.0),), None, True),  # nothing with its options is known
        ((tried(1.0, exposed=0.005, fits=False),), None, True),
        ((tried(None),), None, True),
    ],
)
def test_a_loop_that_could_not_save_what_is_asked_is_ruled_out(compiled, max_exposed, could):
    assert could_gain(way(AHEAD), compiled, 0.01, max_exposed) is could


def test_the_declared_program_is_the_first_and_no_other_is_it():
    plan = plan_as_declared(*V5P, "overlap=prefetch", "overlap.flag_presets=[sparse_core]")
    candidates = overlap_candidates(plan, estimate_declared(plan))
    ways = [(one.way.layers, one.way.flag_presets) for one in candidates]
    assert ways[0] == (plan.spec.overlap.layers, ("sparse_core",))
    assert len(set(ways)) == len(ways)
    expected = [one.wait for one in candidates[1:]]
    assert expected == sorted(expected)
    assert (FLAT, ()) in ways


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize(
    ("sharding", "prefetched", "deferred", "early"),
    [
        ("fsdp", True, True, False),
        ("hsdp", True, True, True),
        ("zero2", False, False, False),
        ("ddp", False, False, True),
    ],
)
def test_only_what_is_gathered_is_prefetched_and_what_is_left_reduced_early(sharding, prefetched, deferred, early):
    plan = plan_of("target=h100-8", f"sharding={sharding}")
    candidates = overlap_candidates(plan, estimate_declared(plan))
    loops = [one.way.layers for one in candidates]
    assert len({one.way.model_dump_json() for one in candidates}) == len(candidates)
    assert any(loop.prefetch for loop in loops) == prefetched
    assert any(loop.deferred_reduce_scatter for loop in loops) == deferred
    assert any(loop.reduce_in_backward for loop in loops) == early


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        (("target=v5p-16", "sharding=fsdp_tensor"), {1, 2}),
        (("target=h100-16", "sharding=fsdp_tensor"), {1, 2}),  # a split batch has other presets by default
        (("target=v5p-16", "sharding=fsdp"), {1}),  # nothing to wait for between matmuls
        pytest.param(  # one sequence each
            ("target=v5p-16", "sharding=fsdp_tensor", "global_batch_size=4"), {1}, marks=pytest.mark.ci
        ),
    ],
)
def test_parts_of_the_batch_are_tried_where_matmuls_are_split_and_there_are_two(overrides, numbers):
    plan = plan_of(*overrides)
    candidates = overlap_candidates(plan, estimate_declared(plan))
    assert {one.way.layers.batch_split for one in candidates} == numbers
    one = next(one for one in candidates if one.way.layers.batch_split == max(numbers))
    assert plan_of(*overrides, *one.overrides).spec.overlap == applied(one.way, plan.spec).overlap


def test_a_part_that_is_not_whole_sequences_is_told():
    with pytest.raises(ConfigError) as told:
        plan_of("sharding=fsdp", "overlap.layers.batch_split=3")
    (problem,) = told.value.problems
    assert problem.where == "overlap.layers.batch_split"
    assert (problem.what, problem.fix) == ("2 sequences of a device are not divisible by 3", "use 2")


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize(
    ("target", "sharding", "most"), [("v5e-8", "fsdp_tensor", 1), ("v5e-8", "fsdp", 2), ("h100-8", "fsdp_tensor", 2)]
)
def test_layers_are_not_unrolled_where_the_compiler_would_abort(target, sharding, most):
    plan = plan_of(f"target={target}", f"sharding={sharding}")
    assert max(one.way.layers.unroll for one in overlap_candidates(plan, estimate_declared(plan))) == most


@pytest.mark.parametrize(("sharding", "has_tensor"), [("fsdp", False), ("fsdp_tensor", True)])
def test_sets_for_activations_are_tried_where_those_are_split(sharding, has_tensor):
    plan = plan_of("target=v5e-8", f"sharding={sharding}")
    sets = {name for one in overlap_candidates(plan, estimate_declared(plan)) for name in one.way.flag_presets}
    assert ("windowed_einsum" in sets) == has_tensor
    assert "synchronous" not in sets
    assert "sparse_core" not in sets
    assert "async_fusion" not in sets  # the same program as without


def test_the_model_of_what_is_exposed_is_the_sum_by_hand():
    """Nothing hides: every collective is exposed, the roofline's sum. All layers hide: what is outside of them is left,
    and the copies of the weights that wait: each layer's, written and read, forward and backward, or every other's."""
    plan = plan_as_declared(*V5P)
    estimate = estimate_declared(plan)
    links = {part.name.split(" ")[0]: part.link_seconds or 0.0 for part in estimate.roofline}
    alone = expected_wait(plan, estimate, way(FLAT)).seconds
    assert alone == pytest.approx(sum(links.values()), rel=1e-6)
    loops = (FLAT, AHEAD, AHEAD.model_copy(update={"unroll": 1}))
    hidden, half_copied, copied = (expected_wait(plan, estimate, way(loop, "sparse_core")).seconds for loop in loops)
    assert hidden == pytest.approx(alone - links["layers"] - links.get("attention", 0.0), rel=0.02)
    layers = [array for array in plan.sharding.parameters if array.array.path.startswith("layers/")]
    matrices = sum(2 * math.prod(array.array.shape) for array in layers)
    assert plan.target.chip is not None
    assert copied - hidden == pytest.approx(2 * 2 * matrices / plan.target.chip.hbm_bytes_per_second, rel=0.01)
    assert half_copied - hidden == pytest.approx((copied - hidden) / 2, rel=0.01)


def test_a_way_that_waits_for_links_of_unknown_time_is_not_as_if_it_took_none(monkeypatch):
    """Where no gather's time is known, a way that leaves the layers' exposed waits for their bytes and comes last."""
    plan = plan_as_declared(*V5P)
    estimate, known = estimate_declared(plan), type(plan.mesh).alone_seconds
    ways = (way(FLAT), way(AHEAD, "sparse_core"))
    waits, hides = (expected_wait(plan, estimate, each) for each in ways)
    assert (waits.unknown_bytes, hides.unknown_bytes) == (0, 0)
    assert waits > hides
    monkeypatch.setattr(
        type(plan.mesh), "alone_seconds", lambda self, kind, *of: None if "gather" in kind else known(self, kind, *of)
    )
    gathers = [one for one in estimate.communication if one.kind == "all-gather"]
    waits, hides = (expected_wait(plan, estimate, each) for each in ways)
    assert waits.unknown_bytes == sum(one.bytes for one in gathers)
    assert hides.unknown_bytes == sum(one.bytes for one in gathers if not one.origin.name.startswith("layers/"))
    assert waits > hides
    waiting = [one.wait.unknown_bytes for one in overlap_candidates(plan, estimate)]
    assert waiting[-1] == max(waiting) > min(waiting[1:])


def test_more_communication_than_compute_stays_exposed_whatever_is_tried():
    plan = plan_as_declared("target=h100-64", "model=linear_stack", "global_batch_size=64", "sequence_length=128")
    estimate = estimate_declared(plan)
    compute = sum(max(part.flops_seconds or 0.0, part.hbm_seconds or 0.0) for part in estimate.roofline)
    links = sum(part.link_seconds or 0.0 for part in estimate.roofline)
    assert links > compute
    assert expected_wait(plan, estimate, way(AHEAD)).seconds >= links - compute


def test_a_set_for_another_chip_and_one_that_does_not_exist_are_both_told():
    with pytest.raises(ConfigError) as told:
        plan_of("target=v5e-8", "overlap.flag_presets=[sparse_core, sparse_cores]")
    assert [problem.where for problem in told.value.problems] == [f"overlap.flag_presets[{n}]" for n in (0, 1)]
    assert "v5e-8" in told.value.problems[0].what


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        (("model=tiny_moe", "target=h100-16"), 4), (("target=h100-16",), None),
        (("model=tiny_moe", "target=h100-8"), None),
        (("model=tiny_moe", "target=h100-16", "overlap.flag_presets=[]"), None),
    ],
)  # fmt: skip
def test_by_default_experts_over_nodes_of_gpus_have_several_collectives_on_their_way(overrides, options):
    plan = plan_of(*overrides, "sharding=fsdp", "global_batch_size=16")
    assert plan.preset_options.get("xla_gpu_experimental_parallel_collective_overlap_limit") == options
    assert plan_hiding(plan).at_once == (options or 1)


def test_the_later_set_wins():
    plan = plan_of("target=h100-8", "overlap.flag_presets=[combined, single]")
    threshold = "xla_gpu_all_gather_combine_threshold_bytes"
    combined, single = (preset_file().presets[name].values["gpu"][threshold] for name in ("combined", "single"))
    assert combined != single
    assert plan.preset_options[threshold] == single
    assert plan_preset_options(["single", "combined"], plan.target)[threshold] == combined


@pytest.mark.ci
def test_an_option_of_a_set_that_the_compiler_does_not_know_is_left_out_and_reported():
    """A declared one would be an error: test_compile.py."""
    plan = plan_of(*SMALL, "model.num_layers=1", "compiler_options={xla_cpu_enable_fast_math: true}")
    unknown = {"xla_not_yet": True, "xla_embed_ir_in_executable": True, "xla_cpu_enable_fast_math": False}
    lowered = lower_ahead(replace(plan, preset_options=unknown), plan.mesh.of_devices(jax.devices()))
    assert lowered.programs.options_left_out == ("xla_not_yet",)
    assert lowered.programs.compiler_options == {"xla_embed_ir_in_executable": True, "xla_cpu_enable_fast_math": True}
    assert compile_ahead(lowered).text


def first_device(plan):
    """Returns the first device of the plan's target; the test is skipped where no compiler for it is installed."""
    try:
        check_compiler(plan.target)
    except ConfigError as error:
        pytest.skip(str(error).splitlines()[0])
    return find_devices(plan.spec.target, plan.target)[0]


@pytest.mark.ci
@pytest.mark.parametrize("chip", ["v5e-8", "v5p-16", "v6e-8", "h100-8"])
def test_most_options_of_each_set_are_known_to_the_compiler_that_is_installed(chip):
    plan = plan_of(f"target={chip}", "global_batch_size=64")
    device = first_device(plan)
    for name in presets_for(plan.target):
        refused = refused_options(plan_preset_options([name], plan.target), device)
        assert all(preset_file().options[option].hazard for option in refused), f"{name}: {refused}"


@pytest.mark.ci
def test_options_that_are_known_and_refused_are_a_problem_in_the_compilers_words():
    """libtpu does not take this scheduler without another option."""
    options = {"xla_nope": 1, "xla_tpu_enable_latency_hiding_layer_scheduler": True}
    device = first_device(plan_of("target=v5p-16", "global_batch_size=64"))
    with pytest.raises(ConfigError) as told:
        check_compiler_options(options, device)
    assert [problem.where for problem in told.value.problems] == ["compiler_options.xla_nope", "compiler_options"]
    assert "requires sparse core collective aggregator" in told.value.problems[1].what


def test_the_views_tell_what_was_tried_and_what_the_compiler_said():
    report, events = reports.fits()
    searched = report.model_copy(update={"search": reports.searched()})
    assert list(unknown_values(searched)) == list(unknown_values(report)), "what was not chosen is nothing unknown"
    page = render_page(searched, events, plan_of())
    assert "<b>prefetch 1, deferred, unroll 2, async_fusion</b>" in page
    assert "INTERNAL: &lt;b&gt;no&lt;/b&gt;" in page
    assert "<h2>What overlap.search compiled</h2>" not in render_page(report, events, plan_of())
    out = io.StringIO()
    show_summary(searched, Console(out, width=100), files=())
    told = out.getvalue()
    assert "best of 3 compiled: prefetch 1, deferred, unroll 2, async_fusion, 12.1 % shorter than scan" in told


class Unreadable:
    """Takes the place of a compiler: its programs take a second less each, and the text of some cannot be read. errors:
    in the place of a program. equal: places whose program is the first one."""

    console = Console(is_quiet=True)

    def __init__(self, *places: int, errors: Mapping[int, Exception] = MappingProxyType({}), equal: Sequence[int] = ()):
        self.places, self.errors, self.equal, self.num_compiled = places, errors, equal, 0

    def compile(self, plan: Plan[RunSpec], overrides: tuple[str, ...], status: str) -> StoredStep:  # noqa: ARG002
        place, self.num_compiled = self.num_compiled, self.num_compiled + 1
        if place in self.errors:
            raise self.errors[place]
        step = reports.fits()[0].compiled.model_copy(update={"step_seconds": 9.0 - place})
        analysis = ScheduleAnalysis((), {}, step, (), {})
        schedule = Unknown("line 7: no instruction") if place in self.places else analysis
        memory = ProgramMemory(*[0] * 7)
        built = Built("HloModule", memory, None, {}, {}, 1.0, ())
        lowered: Any = SimpleNamespace(fingerprint=SimpleNamespace(digest=str(0 if place in self.equal else place)))
        step = CompiledStep(plan, estimate_step(plan), lowered, built, schedule, NO_PROGRAM)
        return StoredStep(step, None, overrides)


@pytest.mark.parametrize(
    ("unread", "chosen"),
    [((0,), 2), *(pytest.param(*each, marks=pytest.mark.ci) for each in (((2,), 1), ((1, 2), 0), ((0, 1, 2), 0)))],
)
def test_what_cannot_be_read_is_not_judged(unread, chosen):
    plan = plan_of("target=h100-8", "overlap=auto", "overlap.search.max_candidates=3", "compilation_cache=null")
    compiler: Any = Unreadable(*unread)
    best, search = search_overlap(plan, compiler, ())
    assert search.chosen == chosen
    steps = [one.figures.step_seconds for one in search.tried]
    assert [place for place, step in enumerate(steps) if step == Unknown("line 7: no instruction")] == [*unread]
    assert best.step.plan.spec.overlap.layers == search.tried[chosen].layers
    assert isinstance(best.step.schedule, Unknown) == (chosen in unread)
    report = reports.fits()[0].model_copy(update={"search": search})
    out = io.StringIO()
    show_summary(report, Console(out, width=100), files=())
    told = out.getvalue()
    assert ("none of 3 can be judged" in told) == (unread == (0, 1, 2))


def test_what_the_compiler_fails_on_or_refuses_is_told_and_the_search_goes_on():
    plan = plan_of("target=h100-8", "overlap=auto", "overlap.search.max_candidates=4", "compilation_cache=null")
    refused = ConfigError([Problem("compiler_options", "requires another", "")])
    compiler: Any = Unreadable(errors={1: jax.errors.JaxRuntimeError("INTERNAL: no\nat x.cc"), 3: refused})
    best, search = search_overlap(plan, compiler, ())
    reasons = [getattr(one.figures.step_seconds, "why", None) for one in search.tried]
    assert reasons == [None, "INTERNAL: no", None, "requires another"]
    assert search.chosen == 2
    assert best.step.plan.spec.overlap.layers == search.tried[2].layers


@pytest.mark.ci
@pytest.mark.parametrize(("least", "number"), [(0.0, 6), (0.99, 5)])
def test_loops_that_could_not_save_what_is_asked_are_not_compiled(least, number):
    """Steps of 9, 8, 7 s, and so on: the declared one and one for each of four sets of options, then those with as
    much arithmetic as the first of the same options."""
    line = ("target=h100-8", "overlap=auto", "overlap.search.max_candidates=6", "compilation_cache=null")
    plan = plan_of(*line, f"overlap.search.min_gain={least}")
    compiler: Any = Unreadable()
    best, search = search_overlap(plan, compiler, ())
    assert (len(search.tried), search.chosen) == (number, number - 1)
    assert best.step.plan.spec.overlap.layers == search.tried[-1].layers
    assert best.step.plan.spec.overlap.flag_presets == search.tried[-1].flag_presets
    num_others = len(overlap_candidates(plan, estimate_declared(plan))) - number
    assert search.num_ruled_out + search.num_untried == num_others
    assert (search.num_untried > 0) == (least == 0.0)
    assert search.bound == ("max_candidates=6" if search.num_untried else None)


@pytest.mark.ci
def test_a_program_that_was_compiled_is_not_judged_twice():
    plan = plan_of("target=h100-8", "overlap=auto", "overlap.search.max_candidates=3", "compilation_cache=null")
    compiler: Any = Unreadable(equal=(1, 3))  # to what was compiled first
    _, search = search_overlap(plan, compiler, ())
    assert (compiler.num_compiled, len(search.tried), search.num_equal) == (5, 3, 2)
    num_all = len(overlap_candidates(plan, estimate_declared(plan)))
    assert len(search.tried) + search.num_equal + search.num_ruled_out + search.num_untried == num_all


@pytest.mark.ci
def test_what_was_decided_for_one_demand_is_not_taken_for_another(tmp_path):
    """The steps are alike but for their lengths, and all are exposed: the demand changes nothing but the decision."""
    line = ("target=h100-8", "overlap=auto", "overlap.search.max_candidates=2", f"compilation_cache={tmp_path}")
    found = []
    for demand in ("null", "0.03", "null", "0.03", "0.02"):
        compiler: Any = Unreadable()
        plan = plan_of(*line, f"overlap.max_exposed={demand}")
        found.append(search_overlap(plan, compiler, ())[1].cache)
    assert found == ["miss", "miss", "hit", "hit", "miss"]


@pytest.mark.ci
def test_a_search_compiles_judges_takes_the_best_and_is_not_done_twice(tmp_path):
    line = ("compile", "target=v5e-8", "model=linear_stack", "model.embed_dim=512", "model.num_layers=4",
            "sequence_length=256", "global_batch_size=64", "data=synthetic", "overlap=auto",
            "overlap.search.max_candidates=2", f"compilation_cache={tmp_path}/cache")  # fmt: skip
    first = meshloom(*line, f"hydra.run.dir={tmp_path}/first")
    assert first.returncode == 0, first.stderr
    report = Report.model_validate_json((tmp_path / "first" / "report.json").read_text())
    assert report.search is not None
    assert (report.search.cache, len(report.search.tried)) == ("miss", 2)
    assert report.search.num_untried > 0
    seconds = [one.figures.step_seconds for one in report.search.tried]
    assert report.compiled.step_seconds == min(one for one in seconds if not isinstance(one, Unknown))
    assert seconds[report.search.chosen] == report.compiled.step_seconds
    assert report.search.tried[0].layers == FLAT
    assert "<h2>What overlap.search compiled</h2>" in (tmp_path / "first" / "report.html").read_text()

    second = meshloom(*line, f"hydra.run.dir={tmp_path}/second")
    assert "decided before" in second.stdout
    again = Report.model_validate_json((tmp_path / "second" / "report.json").read_text())
    assert again.search
    assert again.build
    assert report.build
    assert (again.search.cache, again.build.cache) == ("hit", "hit")
    assert again.build.fingerprint == report.build.fingerprint

    pinned = [word for word in line if not word.startswith("overlap.search")]
    third = meshloom(*pinned, *report.search.overrides, f"hydra.run.dir={tmp_path}/third")
    assert third.returncode == 0, third.stderr
    built = json.loads((tmp_path / "third" / "report.json").read_text())["build"]
    assert (built["cache"], built["fingerprint"]) == ("hit", report.build.fingerprint)


@pytest.mark.ci
def test_no_program_is_begun_after_the_budget(tmp_path):
    line = ("compile", "target=v5e-8", "model=linear_stack", "model.embed_dim=256", "model.num_layers=2",
            "sequence_length=128", "global_batch_size=8", "data=synthetic", "overlap=auto", "compilation_cache=null",
            "overlap.search.budget_seconds=0.001", f"hydra.run.dir={tmp_path}")  # fmt: skip
    assert meshloom(*line).returncode == 0
    report = Report.model_validate_json((tmp_path / "report.json").read_text())
    assert report.search is not None
    assert (len(report.search.tried), report.search.chosen, report.search.cache) == (1, 0, "off")


@pytest.mark.parametrize(
    ("target", "sets"),
    [
        ("v5e-8", {"no_async_fusion"}),
        ("v5p-16", {"sparse_core"}),
        ("h100-8", {"pipelined", "concurrent", "combined", "single"}),
    ],
)
def test_each_set_for_weights_is_tried_before_any_for_the_second_time(target, sets):
    plan = plan_of(f"target={target}", "sharding=fsdp")
    candidates = overlap_candidates(plan, estimate_declared(plan))
    firsts = [one.way.flag_presets for one in candidates[1 : 1 + len(sets)]]
    assert {name for names in firsts for name in names} == sets
