"""Judges a profile of any program: what each operation took, beside what was predicted of it.

profile -> the program in it -> its prediction -> both compared     docs/inspect.md
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, cast

from meshloom.compiler.analysis.compiled_step import NAME_IT, InspectedProgram, inspect_text
from meshloom.compiler.analysis.program_devices import ProgramDevices
from meshloom.compiler.analysis.schedule_analysis import analyse_program
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem, all_of, raise_if_any
from meshloom.compiler.core.format import human_names, human_share
from meshloom.compiler.core.known import known
from meshloom.compiler.profile.compare import ProfileReport, compare, compare_rows, typical_execution
from meshloom.compiler.profile.op_table import num_executions, predict_rows
from meshloom.compiler.profile.prediction import Prediction, once_in_a_step, predict_inspected
from meshloom.compiler.profile.trace import (
    Execution,
    Platform,
    accelerators,
    compute_capabilities,
    measured_trips,
    trace_of,
)
from meshloom.compiler.report.build_report import report_inspected
from meshloom.compiler.report.views.page import page_in_frame, render_page
from meshloom.compiler.report.views.profile import measured_part, render_profile, show_profile
from meshloom.compiler.report.views.summary import show_findings
from meshloom.compiler.target.placement import plan_own_order
from meshloom.compiler.target.target import TargetPlan
from meshloom.compiler.xla.hlo import module_name
from meshloom.compiler.xla.schedule.steps import Choices

from ..core.files import replace_text
from ..rundir.profile_files import PAGE, REPORT
from ..rundir.run_dir import write_report
from .declared import library_call
from .found_profile import GIVE_TEXT, FoundProfile, choose_measured, text_of_program
from .inspected import (
    TARGET,
    FoundProgram,
    Inspection,
    ProgramRequest,
    devices_of,
    find_program,
    inspect_program,
    names_target,
    profile_at,
)

MOST_UNMATCHED = 0.5  # of the measured time, for a text to be that of the program that ran


@dataclass(frozen=True, repr=False)
class Judgement:
    """A profile beside its prediction.

    program: the program that ran; None for a table of operations without its text. execution: the measured step that
    is shown; None for a table. source: the profile. note: the choices that were made among several programs or
    sessions; empty if there was none. choices: how often loops and branches of the program run.
    """

    profile: ProfileReport
    prediction: Prediction
    program: InspectedProgram | None
    execution: Execution | None
    source: Path
    note: str = ""
    choices: Choices | None = None

    @cached_property
    def text(self) -> str:
        """Returns what `meshloom inspect` prints."""
        out = io.StringIO()
        self.show(Console(out, is_terminal=False), files=())
        return out.getvalue()

    @cached_property
    def json(self) -> dict[str, Any]:
        """Returns the content of profile.json."""
        return self.profile.model_dump(mode="json")

    @cached_property
    def html(self) -> str:
        """Returns the content of report.html; of profile.html where the program is not known."""
        if self.program is None:
            return render_profile(self.profile, self.prediction, self.execution)
        report = report_inspected(self.program)
        return render_page(report, self.program.events, measured=self._measured)

    @property
    def _measured(self) -> dict[str, Any]:
        return measured_part(self.profile, self.prediction, self.execution)

    def show(self, console: Console, *, files: Sequence[Path], is_by_name: bool = False) -> None:
        """Prints measured and predicted times, and what the program does wrong. is_by_name: as in `show_profile`."""
        show_profile(self.profile, console, files=files if self.program is None else (), is_by_name=is_by_name)
        if self.program is not None:
            show_findings(report_inspected(self.program), console, files=files)

    def write(self, directory: str | PathLike[str]) -> tuple[Path, ...]:
        """Writes profile.json, and the report of the program with the measured step, into a directory. Returns the
        paths, beginning with the one to open."""
        place = Path(directory)
        place.mkdir(parents=True, exist_ok=True)
        profile = self.profile.model_dump_json(indent=1) + "\n"
        if self.program is None:
            texts = {PAGE: self.html, REPORT: profile}
            for name, text in texts.items():
                replace_text(place / name, text)
            return tuple(place / name for name in texts)
        replace_text(place / REPORT, profile)
        report, events = report_inspected(self.program), self.program.events
        files = write_report(report, None, place, events=events, measured=self._measured)
        return (*files, place / REPORT)

    def predicted_on(self, target: TargetPlan) -> float | None:
        """Returns the seconds of the step with other figures of the chip; None where they are not known."""
        if self.program is None:
            return None
        devices = replace(self.program.devices, placement=plan_own_order(target))
        return known(analyse_program(self.program.module, devices, choices=self.choices).step.step_seconds)

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return page_in_frame(self.html, "Meshloom report")


def inspect_profile(
    profile: str | PathLike[str],
    *overrides: str,
    target: str | None = None,
    text: str | PathLike[str] | None = None,
    module: str | None = None,
    trips: int | Mapping[str, int] | None = None,
    taken: float | Mapping[str, float] | None = None,
    config_dir: str | PathLike[str] | None = None,
) -> Judgement:
    """Returns what each operation of a profile took, beside what was predicted of it.

    profile: the path of *.xplane.pb, of *.trace.json.gz, of XProf's hlo_stats as CSV or JSON, or of a directory with
    such files. text: the path of the program's text, for a profile that has none in it. The other arguments are those
    of `inspect`. Raises ConfigError for anything that is not such a profile, or that is not of the target.
    """
    asked = ProgramRequest.of(overrides, target, module, trips, taken, config_dir)
    with library_call():
        found = profile_at(Path(profile))
        if found is None:
            what, fix = "there is no profile", "name a profile, or call meshloom.inspect for a program"
            raise ConfigError([Problem(str(profile), what, fix)])
        return judge_profile(found, asked, None if text is None else Path(text))


def inspect_or_judge(path: Path, asked: ProgramRequest, text: Path | None = None) -> Inspection | Judgement:
    """Returns the report of the program at a path, or the judgement of a profile. text: the program of a profile, given
    apart."""
    profile = profile_at(path)
    if profile is not None:
        return judge_profile(profile, asked, text)
    if text is not None:
        what = f"{path} is no profile, and has its program in itself"
        raise ConfigError([Problem(str(text), what, "name one program")])
    return inspect_program(path, asked)


def judge_profile(profile: FoundProfile, asked: ProgramRequest, text: Path | None = None) -> Judgement:
    """Returns the judgement of a profile. text: its program, given apart."""
    if not names_target(asked.overrides) and (kinds := profile.device_kinds()):
        what = f"it is missing; the profile is of {human_names(kinds)}"
        raise ConfigError([Problem(TARGET, what, "add target=v5p-128, or another target of these chips")])
    given, devices = all_of(lambda: None if text is None else find_program(text), lambda: devices_of(asked.overrides))
    return _judged(profile, devices, given, asked)


def _judged(
    found: FoundProfile, devices: ProgramDevices, given: FoundProgram | None, asked: ProgramRequest
) -> Judgement:
    """Returns a profile beside its prediction. given: its program, where it was given apart. Raises ConfigError for a
    profile of no program, of several, of other chips, and for another program."""
    raise_if_any(_wrong_chips(found, devices.target))
    if found.rows:
        return _judged_table(found, devices, given, asked)
    choices = asked.choices
    name, note = choose_measured(found, asked.module or (module_name(given.text) if given else None))
    text, place = (given.text, given.path) if given else (text_of_program(found, name), found.path)
    program = inspect_text(text, devices, name=str(place), choices=choices)
    once = once_in_a_step(program.module)
    traces = [trace_of(planes, name, process, once) for process, planes in enumerate(found.hosts)]
    executions = [each for trace in traces for each in trace.executions]
    if not executions:
        what = f"has no whole run of {name}"
        raise ConfigError([Problem(str(found.path), what, "trace a few whole steps")])
    if trips := measured_trips(program.module, program.analysis.step.counted_once, executions):
        given_too = choices or Choices()
        choices = Choices({**trips, **given_too.trips}, given_too.shares)
        program = inspect_text(text, devices, name=str(place), choices=choices)
        note = _notes(note, "iterations by the profile: " + human_names([f"{k}={v}" for k, v in trips.items()]))
    prediction = predict_inspected(program)
    report = compare(traces, prediction)
    if given is not None:
        raise_if_any(_other_program(report, given.path))
    shown, said = typical_execution(traces), _notes(found.note, note)
    return Judgement(report, prediction, program, shown, found.path, said, choices)


def _judged_table(
    found: FoundProfile, devices: ProgramDevices, given: FoundProgram | None, asked: ProgramRequest
) -> Judgement:
    name, note = choose_measured(found, asked.module)
    rows = [row for row in found.rows if row.program == name]
    runs, platform = num_executions(rows), cast(Platform, devices.target.platform)
    if given is None:
        program, prediction = None, predict_rows(rows, devices, runs)
    else:
        program = inspect_text(given.text, devices, name=str(given.path), choices=asked.choices)
        prediction = predict_inspected(program)
    report = compare_rows(rows, prediction, runs, platform)
    if given is not None:
        raise_if_any(_other_program(report, given.path))
    return Judgement(report, prediction, program, None, found.path, _notes(found.note, note), asked.choices)


def _notes(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _other_program(report: ProfileReport, path: Path) -> Iterator[Problem]:
    """Yields a problem if most of what ran is not in the program."""
    known_seconds = sum(row.measured_seconds for row in report.operations)
    whole = known_seconds + report.unmatched_seconds
    if report.unmatched_seconds > MOST_UNMATCHED * whole:
        share = human_share(report.unmatched_seconds / whole)
        what = f"is another program than the one that ran: {share} of the measured time is of operations that it lacks"
        yield Problem(str(path), what, GIVE_TEXT)


def _wrong_chips(found: FoundProfile, target: TargetPlan) -> Iterator[Problem]:
    """Yields a problem if the profile names other chips than the target's."""
    chip = target.chip
    others = [kind for kind in found.device_kinds() if chip is None or _chip_key(kind) != _chip_key(chip.device_kind)]
    has = f"devices of platform {target.platform}" if chip is None else chip.device_kind
    if others:
        yield Problem("target", f"the profile is of {human_names(others)}, and {target.name} has {has}", NAME_IT)
    elif platforms := accelerators(found.hosts) - {target.platform.upper()}:
        yield Problem("target", f"the profile is of {min(platforms)}s, and {target.name} has {has}", NAME_IT)
        return
    processor = chip.processor if chip else None
    for capability in dict.fromkeys(each for planes in found.hosts for each in compute_capabilities(planes)):
        if processor is None or capability != processor.compute_capability:
            of = ".".join(map(str, capability))
            what = f"the profile is of GPUs of compute capability {of}, and {target.name} has {has}"
            yield Problem("target", what, NAME_IT)


_SAME = {"5lite": "5e", "6lite": "6e", "5": "5p"}  # what JAX and the profiler call the same chip


def _chip_key(kind: str) -> str:
    """Returns a name of a TPU in one form: 'TPU v5 lite', 'TPU v5e' -> '5e'."""
    short = kind.lower().replace("tpu", "").replace(" ", "").removeprefix("v")
    return _SAME.get(short, short)
