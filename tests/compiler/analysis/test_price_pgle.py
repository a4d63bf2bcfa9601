"""PGLE files: what is written from prices, which program they are of, and which declarations they change."""

import re
from dataclasses import replace
from functools import cache

import jax
import pytest

from conftest import plan_of
from meshloom.compiler.analysis.price_pgle import pgle_maker, price_pgle
from meshloom.compiler.analysis.schedule_analysis import ScheduleAnalysis, analyse_schedule
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_declared, estimate_step
from meshloom.compiler.estimate.step_time import plan_hiding
from meshloom.compiler.plan import Plan
from meshloom.compiler.xla.aot import compile_ahead, lower_ahead
from meshloom.compiler.xla.hlo import parse_module
from meshloom.compiler.xla.pgle import OPTION, pgle_text, program_fingerprint
from meshloom.compiler.xla.programs import pgle_options
from meshloom.runtime.compile.artifact import read_artifact, write_artifact
from support.recorded import SCHEDULES, recorded_text

SECTION = (SCHEDULES / "README.md").read_text().partition("**h100_fsdp**")[2]
H100 = tuple(SECTION.partition("meshloom compile ")[2].partition("\n")[0].split())
COST = re.compile(r'costs \{ name: "([\w.-]+)" cost_us: ([\d.e+-]+) \}')
PGLE = "overlap.pgle"


@cache
def priced() -> tuple[str, Plan, ScheduleAnalysis]:
    plan, text = read_spec(Request(H100), then=plan_run), recorded_text("h100_fsdp")
    return (
        price_pgle(text, plan.mesh.placement, plan.ops),
        plan,
        analyse_schedule(parse_module(text), plan, estimate_step(plan).communication),
    )


def costs_of(profile: str) -> dict[str, float]:
    """The seconds of each instruction, as XLA reads them: every line is a comment or an entry of the text format."""
    lines = [line for line in profile.splitlines() if not line.startswith("#")]
    return {match[1]: float(match[2]) / 1e6 for match in map(COST.fullmatch, lines) if match}


def test_times_of_instructions_add_up_to_those_of_the_report():
    """An instruction runs a whole number of times, and all of its executions take what the report has for it."""
    profile, _, analysis = priced()
    costs = costs_of(profile)
    assert len(costs) == len(profile.splitlines()) - 1, "the first line says which program it is of"
    compute = {name: seconds for name, seconds in analysis.compute_seconds.items() if seconds}
    moved = {each.name: each for each in analysis.collectives}
    assert set(costs) == {*compute, *moved}
    for name, seconds in compute.items():
        executions = seconds / costs[name]
        assert executions == pytest.approx(round(executions), rel=1e-4), name
    for name, each in moved.items():
        assert each.alone_seconds == pytest.approx(each.count * costs[name], rel=1e-4), name


def test_a_file_is_taken_by_the_program_that_it_is_of_alone(tmp_path):
    text, file = recorded_text("h100_fsdp"), tmp_path / "own.pbtxt"
    file.write_text(pgle_text("0ddc0de", {"a": 1.0}))
    plan = plan_of("target=h100-8", f"{PGLE}={file}")
    read = pgle_maker(plan.spec.overlap.pgle, plan.mesh.placement, plan.ops)
    assert read is not None
    of_this = program_fingerprint(text)
    for content, told in (
        (
            pgle_text("0ddc0de", {"a": 1.0}),
            f"of another program: its fingerprint_before_lhs is 0ddc0de, and .* {of_this}",
        ),
        ('costs { name: "a" cost_us: 1 }\n', "does not say by which program"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError) as refused:
            read(text)
        (problem,) = refused.value.problems
        assert problem.where == PGLE
        assert re.search(told, problem.what)
    file.write_text(priced()[0])
    assert read(text) == priced()[0]


@pytest.mark.parametrize(
    ("words", "where", "told"),
    [
        (("target=v5e-16", f"{PGLE}=prices"), PGLE, "only XLA's compiler for GPUs .* v5e-16 is of platform tpu"),
        (("target=cpu-8", f"{PGLE}=prices"), PGLE, "cpu-8 is of platform cpu"),
        (("target=h100-8", f"{PGLE}=nowhere.pbtxt"), PGLE, "there is no file nowhere.pbtxt"),
        (("target=h100-8", f"{PGLE}={SCHEDULES}/README.md"), PGLE, "is no PGLE file"),
        (
            ("target=h100-8", f"{PGLE}=prices", f"compiler_options={{{OPTION}: x}}"),
            f"compiler_options.{OPTION}",
            "and so is",
        ),
    ],
)
def test_what_cannot_be_scheduled_by_a_file_is_refused(words, where, told):
    with pytest.raises(ConfigError) as refused:
        plan_of(*words)
    (problem,) = refused.value.problems
    assert problem.where == where
    assert re.search(told, problem.what)


def test_programs_by_other_times_are_other_programs(tmp_path):
    """The path of a file is not part of them, and its content is."""
    one, other = tmp_path / "one.pbtxt", tmp_path / "other.pbtxt"
    texts = [pgle_text("0ddc0de", {name: 1.0}) for name in ("a", "b")]
    one.write_text(texts[0])
    other.write_text(texts[1])
    declared = ("null", "prices", one, other)
    found = [pgle_options(plan_of("target=h100-8", f"{PGLE}={each}").spec) for each in declared]
    found.append(pgle_options(plan_of("target=h100-8", f"{PGLE}=prices", "target.chip.hbm_bytes_per_second=1e12").spec))
    assert found[0] == {}
    assert len({str(each) for each in found}) == 5
    same = pgle_options(plan_of("target=h100-8", f"{PGLE}={one}", "overlap.max_exposed=0.5").spec)
    other.write_text(texts[0])
    assert same == found[2] == pgle_options(plan_of("target=h100-8", f"{PGLE}={other}").spec)


@pytest.mark.ci
def test_estimates_take_the_times_of_a_file_to_be_right():
    """Then what XLA expects of links without one makes no difference, as it does otherwise."""

    def exposed(plan: Plan, pgle: str | None) -> float:
        spec = plan.spec.settled(overlap=plan.spec.overlap.model_copy(update={"pgle": pgle}))
        hiding = plan_hiding(replace(plan, spec=spec))
        assert hiding.by_prices is (pgle is not None)
        seconds = estimate_declared(replace(plan, spec=spec)).figures.exposed_seconds
        assert isinstance(seconds, float)
        return seconds

    words = ("target=h100-64", "model=llama3_8b", "model.num_layers=8", "sharding=fsdp", "sequence_length=8192",
             "global_batch_size=64", "remat=full", "data=synthetic")  # fmt: skip
    plan = read_spec(Request(words), then=plan_run)
    expects = plan.target.compiler.expected_across
    assert expects is not None
    slower = replace(plan, target=replace(plan.target, compiler=plan.target.compiler.model_copy(
        update={"expected_across": expects.model_copy(update={"bytes_per_second": expects.bytes_per_second / 4})}
    )))  # fmt: skip
    assert exposed(plan, "prices") == exposed(slower, "prices") < exposed(plan, None)
    assert exposed(plan, None) != exposed(slower, None)


@pytest.mark.ci
def test_the_file_of_a_compile_is_kept_in_its_artifact(tmp_path):
    """The train step is compiled twice: the file is made from the first program. A CPU's compiler does not read it."""
    plan = plan_of("model.num_layers=1", "global_batch_size=8")
    lowered, seen = lower_ahead(plan, plan.mesh.of_devices(jax.devices())), list[str]()

    def made(text: str) -> str:
        seen.append(text)
        return pgle_text("0ddc0de", {"dot": 2.5})

    built = compile_ahead(replace(lowered, pgle=made))
    assert [("is_scheduled=true" in text) for text in seen] == [True]
    assert built.pgle == '# fingerprint_before_lhs: 0ddc0de\ncosts { name: "dot" cost_us: 2.5e+06 }\n'
    write_artifact(tmp_path / "artifact", lowered.fingerprint, built, ())
    assert read_artifact(tmp_path).built.pgle == built.pgle
