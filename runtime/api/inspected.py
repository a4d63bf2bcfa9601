"""Reports any compiled JAX program: a `jax.jit` function, the step of another framework, or a text.

A text is that of a file, a dump of XLA, or a run directory:

step.txt, step.hlo.pb          the text of `compiled.as_text()`, or a module of a dump, as text or protocol buffer
DUMP/*after_optimizations.txt  from `--xla_dump_to=DUMP`: the largest, which is the step of a training program
RUN, RUN/artifact              from `meshloom compile`: the declaration beside it has the order of the devices
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
from pydantic import TypeAdapter, ValidationError

from meshloom.compiler.analysis.compiled_step import InspectedProgram, choose_program, inspect_text, problems_of_devices
from meshloom.compiler.analysis.program_devices import ProgramDevices
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.hydra_settings import SEARCH_PATH, search_path_override
from meshloom.compiler.declare.overrides import overridden_key
from meshloom.compiler.report.build_report import report_inspected
from meshloom.compiler.report.views.page import page_in_frame, render_page
from meshloom.compiler.report.views.summary import show_summary
from meshloom.compiler.report.views.timeline import chrome_trace
from meshloom.compiler.schema import Event, Report
from meshloom.compiler.spec.calibration_spec import Calibration
from meshloom.compiler.spec.plan_spec import MeshSpec
from meshloom.compiler.spec.target_spec import TargetSpec
from meshloom.compiler.target.compiler_options import with_options
from meshloom.compiler.target.mesh import plan_mesh
from meshloom.compiler.target.placement import plan_own_order
from meshloom.compiler.target.target import TargetPlan, calibrate_target, plan_target
from meshloom.compiler.xla.aot import ProgramMemory, memory_of
from meshloom.compiler.xla.hlo import HloError, split_modules
from meshloom.compiler.xla.protos import proto_text
from meshloom.compiler.xla.schedule.steps import ALL, Choices

from ..compile.artifact import FOLDER, TEXT, read_artifact
from ..core.inputs import bytes_of_file, plain_name, text_of_file
from ..rundir.folders import SPEC, RunFolder
from ..rundir.run_dir import write_report
from .declared import check_overrides, library_call
from .found_profile import XPLANE, FoundProfile, find_profile

T = TypeVar("T", int, float)
DUMPED = "*after_optimizations.txt"
_DUMPS = (f"{DUMPED}*", "*after_optimizations.hlo.pb*")  # also compressed
TARGET = "target"
KEYS = (TARGET, "calibration")  # keys of a declaration that describe the devices of a program
GIVE = "give the text of a compiled program, a profile, an XLA dump directory, or a run directory"


@dataclass(frozen=True)
class ProgramRequest:
    """The words with which a program or a profile is read.

    overrides: of target, calibration and the config search path, as typed. module: the name of the program to read, if
    there are several. choices: how often its loops and branches run.
    """

    overrides: tuple[str, ...]
    module: str | None = None
    choices: Choices | None = None

    @classmethod
    def of(
        cls,
        overrides: Sequence[Any],
        target: str | None,
        module: str | None,
        trips: int | Mapping[str, int] | None,
        taken: float | Mapping[str, float] | None,
        config_dir: str | PathLike[str] | None,
    ) -> Self:
        """Returns the request of the arguments of `inspect`."""
        named = (*([] if target is None else [f"target={target}"]), *check_overrides(overrides))
        named = search_path_override(named, None if config_dir is None else fspath(config_dir))
        choices = None if trips is None and taken is None else Choices(_by_name(trips), _by_name(taken))
        return cls(tuple(named), module, choices)


@dataclass(frozen=True, repr=False)
class Inspection:
    """A compiled program as its text describes it.

    source: the file of the text; None if it did not come from one. note: the choice that was made among several
    programs; empty if there was none.
    """

    report: Report
    events: tuple[Event, ...]
    source: Path | None = None
    note: str = ""

    @cached_property
    def text(self) -> str:
        """Returns what `meshloom inspect` prints."""
        out = io.StringIO()
        self.show(Console(out, is_terminal=False), files=())
        return out.getvalue()

    def show(self, console: Console, *, files: Sequence[Path]) -> None:
        """Prints the summary, and the names of the files."""
        show_summary(self.report, console, files=files)

    @cached_property
    def json(self) -> dict[str, Any]:
        """Returns the content of report.json."""
        return self.report.model_dump(mode="json")

    @cached_property
    def html(self) -> str:
        """Returns the content of report.html."""
        return render_page(self.report, self.events)

    @cached_property
    def timeline(self) -> dict[str, Any]:
        """Returns the content of timeline.json, for Perfetto."""
        return json.loads(json.dumps(chrome_trace(self.report, self.events)))

    def write(self, directory: str | PathLike[str]) -> tuple[Path, ...]:
        """Writes report.json, timeline.json and report.html into a directory, and returns their paths."""
        place = Path(directory)
        place.mkdir(parents=True, exist_ok=True)
        return write_report(self.report, None, place, events=self.events)

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return page_in_frame(self.html, "Meshloom report")


def inspect(
    program: Any,
    *overrides: str,
    target: str | None = None,
    module: str | None = None,
    trips: int | Mapping[str, int] | None = None,
    taken: float | Mapping[str, float] | None = None,
    config_dir: str | PathLike[str] | None = None,
) -> Inspection:
    """Returns the report of a compiled program, without its declaration.

    program: the result of `jax.jit(step).lower(...)` or of its `.compile()`, the text of `compiled.as_text()`, or the
    path of such a text, of an XLA dump directory, or of a run directory.
    target: the chips that the program is for, as in `target=` of the command. A run directory knows its own.
    module: the name of the program to read, if a text or a dump has several. Default: the largest; `note` says so.
    trips: the number of iterations of loops for which the program does not say it, by name or for all.
    taken: the share of executions in which a conditional takes the branch that ends last, by name or for all.
    overrides: more of the target, such as "target.num_slices=2" or "calibration=mine".
    config_dir: a folder of configs beside ours.
    Raises ConfigError for anything that is not such a program, or that is not for the target.
    """
    asked = ProgramRequest.of(overrides, target, module, trips, taken, config_dir)
    with library_call():
        if isinstance(program, jax.stages.Lowered | jax.stages.Compiled):
            compiled = program.compile() if isinstance(program, jax.stages.Lowered) else program
            return _inspection(
                inspect_text(
                    _text_of(compiled),
                    _devices_of(compiled, asked.overrides),
                    memory=memory_of(compiled),
                    choices=asked.choices,
                )
            )
        if isinstance(program, str) and ("\n" in program or program.lstrip().startswith("HloModule")):
            modules = split_modules(program)
            place, note = choose_program(modules, module, "the text")
            devices = devices_of(asked.overrides)
            return _inspection(inspect_text(modules[place], devices, choices=asked.choices), note=note)
        if isinstance(program, str | PathLike):
            return inspect_path(Path(program), asked)
    what = f"a {type(program).__name__} is not a compiled program"
    raise ConfigError([Problem("program", what, "give jax.jit(step).lower(...).compile(), its text, or a path")])


def inspect_path(path: Path, asked: ProgramRequest) -> Inspection:
    """Returns the report of the program at a path. Raises ConfigError for a profile, which is read by
    `inspect_or_judge`."""
    if profile_at(path) is not None:
        fix = "give the text of its program; `meshloom inspect`, in Python meshloom.inspect_profile, judges a profile"
        raise ConfigError([Problem(str(path), "this is a profile: it has times beside a program", fix)])
    return inspect_program(path, asked)


def inspect_program(path: Path, asked: ProgramRequest) -> Inspection:
    """Returns the report of the program at a path that is no profile."""
    found = find_program(path, asked.module)
    if found.devices is not None and asked.overrides:
        what = f"the declaration of {path} says where its program runs"
        raise ConfigError([Problem(asked.overrides[0], what, "leave it out, or name the program's text")])
    devices = found.devices or devices_of(asked.overrides)
    program = inspect_text(found.text, devices, memory=found.memory, name=str(found.path), choices=asked.choices)
    return _inspection(program, found.path, found.note)


def profile_at(path: Path) -> FoundProfile | None:
    """Returns the profile at a path; None if what is there is a program, or nothing. Raises ConfigError for a profile
    that cannot be read."""
    return None if path.is_dir() and _has_program(path) else find_profile(path)


def _has_program(directory: Path) -> bool:
    """Returns whether a directory has a compiled program of ours or of a dump, besides profiles that it may have."""
    is_run = any((each / FOLDER).is_dir() and (each / SPEC).is_file() for each in (directory, directory.parent))
    return (is_run and (directory.name == FOLDER or (directory / FOLDER).is_dir())) or bool(_dumped(directory))


def _by_name(value: T | Mapping[str, T] | None) -> Mapping[str, T]:
    """Returns numbers of loops or conditionals by name, or one number for all."""
    if value is None:
        return {}
    return value if isinstance(value, Mapping) else {ALL: value}


def _inspection(program: InspectedProgram, source: Path | None = None, note: str = "") -> Inspection:
    return Inspection(report_inspected(program), program.events, source, note)


def _text_of(compiled: jax.stages.Compiled) -> str:
    text = compiled.as_text()
    if text is None:
        what = "its executable has no text: it was loaded, not compiled"
        raise ConfigError([Problem("program", what, "compile it in this process")])
    return text


def _devices_of(compiled: jax.stages.Compiled, named: Sequence[str]) -> ProgramDevices:
    """Returns the devices in the order of the mesh of the program's arguments, with its axes. Without a mesh, the
    target's own order is assumed."""
    target = read_target(named)
    if device := _any_device(compiled):
        raise_if_any(problems_of_devices(device.platform, device.device_kind, target))
    own, mesh = plan_own_order(target), _mesh_of(compiled)
    if mesh is None:
        return ProgramDevices(own, is_assumed=True)
    return ProgramDevices(own, _order(list(mesh.devices.flat), own) if own.is_known else None, dict(mesh.shape))


def _order(devices: Sequence[Any], own: Any) -> tuple[int, ...]:
    """Returns the position of each device in the target's own order. Raises ConfigError if they differ from the
    target's in number or shape."""
    position = {id(device): number for number, device in enumerate(own.ordered(devices).flat)}
    return tuple(position[id(device)] for device in devices)


def _any_device(compiled: jax.stages.Compiled) -> Any:
    """Returns one of the devices that a program was compiled for; None if no array names one."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next((device for sharding in shardings for device in sharding.device_set), None)


def _mesh_of(compiled: jax.stages.Compiled) -> jax.sharding.Mesh | None:
    """Returns the mesh of the arguments or results of a program; None if no array has one."""
    for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
        if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(sharding.mesh, jax.sharding.Mesh):
            return sharding.mesh
    return None


@dataclass(frozen=True)
class FoundProgram:
    """The text of a compiled program.

    devices: the order of its devices; None without a declaration. memory: XLA's count; None if it was not saved. note:
    the choice that was made among several programs; empty if there was none.
    """

    path: Path
    text: str
    devices: ProgramDevices | None = None
    memory: ProgramMemory | None = None
    note: str = ""


def find_program(path: Path, named: str | None = None) -> FoundProgram:
    """Returns the program at a path. named: the name of the program to take, if a text or a dump has several. Raises
    ConfigError if there is none."""
    if path.is_file():
        return _of_text(path, named)
    if not path.is_dir():
        raise ConfigError([Problem(str(path), "there is no such file or directory", GIVE)])
    run_dir = path.parent if path.name == FOLDER and (path.parent / SPEC).is_file() else path
    if (run_dir / FOLDER).is_dir() and (run_dir / SPEC).is_file():
        if named is not None:
            raise ConfigError([Problem("--module", "a run directory has one program", "leave it out")])
        return _of_run(run_dir)
    if (path / TEXT).is_file():
        return _of_text(path / TEXT, named)
    return _of_dump(path, named)


def devices_of(overrides: Sequence[str]) -> ProgramDevices:
    """Returns the devices of a target in its own order. overrides: overrides of `target`, `calibration` and the config
    search path, as typed. Raises ConfigError with all problems in them."""
    return ProgramDevices(plan_own_order(read_target(overrides)), is_assumed=True)


def names_target(overrides: Sequence[str]) -> bool:
    """Returns whether overrides name a target."""
    return any(text.startswith(f"{TARGET}=") for text in overrides)


def read_target(overrides: Sequence[str]) -> TargetPlan:
    """Returns the target that overrides name. Raises ConfigError with all problems in them."""
    if not names_target(overrides):
        what = "it is missing: a program's text does not say which chips it was compiled for"
        raise ConfigError([Problem(TARGET, what, "add target=v5p-128, or another target by its name")])
    others = [
        text
        for text in overrides
        if overridden_key(text) != SEARCH_PATH and overridden_key(text).split(".")[0] not in KEYS
    ]
    if others:
        what, fix = "this says nothing about a program that is compiled", f"set {' and '.join(KEYS)} only"
        raise ConfigError([Problem(text, what, fix) for text in others])
    return read_spec(
        Request(tuple(overrides), predicts=True),
        then=lambda spec: calibrate_target(plan_target(spec.target, "bfloat16"), spec.calibration),
    )


def _of_text(path: Path, named: str | None) -> FoundProgram:
    modules = split_modules(_read(path))
    place, note = choose_program(modules, named, str(path))
    return FoundProgram(path, modules[place], note=note)


def _of_dump(path: Path, named: str | None) -> FoundProgram:
    files = _dumped(path)
    if not files:
        what = f"there is no {DUMPED} in it, as --xla_dump_to writes, no {FOLDER}/{TEXT} and no *{XPLANE}"
        raise ConfigError([Problem(str(path), what, GIVE)])
    texts = [_read(each) for each in files]
    place, note = choose_program(texts, named, str(path))
    return FoundProgram(files[place], texts[place], note=note)


def _dumped(directory: Path) -> list[Path]:
    """Returns the programs of a dump, the largest first: texts, or else protocol buffers, which hold the same."""
    found = next((files for pattern in _DUMPS if (files := list(directory.glob(pattern)))), [])
    return sorted(found, key=lambda each: (-each.stat().st_size, each.name))


def _of_run(run_dir: Path) -> FoundProgram:
    kept = read_artifact(run_dir)
    if kept.built.text is None:
        what = "its step does not fit, so there is no compiled program"
        raise ConfigError([Problem(str(run_dir), what, "see its report.json for what it needs")])
    text = kept.place / TEXT
    return FoundProgram(text, _read(text), _devices_of_run(RunFolder(run_dir)), kept.built.memory)


def _devices_of_run(run: RunFolder) -> ProgramDevices:
    """Returns the devices in the order of the run's mesh."""
    try:
        spec = run.spec
        target = plan_target(_part(TargetSpec, spec, "target"), spec["precision"]["compute"])
        target = calibrate_target(target, _part(Calibration, spec, "calibration"))
        target = with_options(target, spec["overlap"]["flag_presets"], spec["compiler_options"])
        mesh = plan_mesh(_part(MeshSpec, spec, "mesh"), target, tuple(spec["device_order"]))
    except (ValidationError, LookupError, TypeError) as error:
        what = f"is damaged, or of another version of Meshloom: {str(error).splitlines()[0]}"
        raise ConfigError([Problem(str(run.path / SPEC), what, "compile it again")]) from None
    return ProgramDevices(mesh.placement)


def _part(kind: Any, spec: Mapping[str, Any], key: str) -> Any:
    return TypeAdapter(kind).validate_json(json.dumps(spec[key]))


def _read(path: Path) -> str:
    """Returns the text of a program in a file: a text or an HloProto, compressed or not."""
    if not plain_name(path.name).endswith(".pb"):
        return text_of_file(str(path), str(path), GIVE)
    try:
        return proto_text(bytes_of_file(str(path), str(path), GIVE))
    except HloError as error:
        raise ConfigError([Problem(str(path), str(error), GIVE)]) from None
