"""Finds the text of a compiled program: in a file, a dump of XLA, or a run directory.

step.txt                       the text of `compiled.as_text()`, or a module of a dump
DUMP/*after_optimizations.txt  from `--xla_dump_to=DUMP`: the largest, which is the step of a training program
RUN, RUN/artifact              from `meshloom compile`: the declaration beside it has the order of the devices
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from meshloom.compiler.analysis.inspected import choose_program
from meshloom.compiler.analysis.program_devices import ProgramDevices
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.hydra_settings import SEARCH_PATH
from meshloom.compiler.declare.overrides import overridden_key
from meshloom.compiler.spec.calibration_spec import Calibration
from meshloom.compiler.spec.plan_spec import MeshSpec
from meshloom.compiler.spec.target_spec import TargetSpec
from meshloom.compiler.target.mesh import plan_mesh
from meshloom.compiler.target.placement import plan_own_order
from meshloom.compiler.target.target import TargetPlan, calibrate_target, plan_target
from meshloom.compiler.xla.aot import ProgramMemory
from meshloom.compiler.xla.hlo import split_modules

from ..rundir.find_runs import SPEC
from .artifact import FOLDER, TEXT, read_artifact

DUMPED = "*after_optimizations.txt"
TARGET = "target"
KEYS = (TARGET, "calibration")  # keys of a declaration that describe the devices of a program
GIVE = "give the text of a compiled program, an XLA dump directory, or a run directory"


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


def read_target(overrides: Sequence[str]) -> TargetPlan:
    """Returns the target that overrides name. Raises ConfigError with all problems in them."""
    if not any(text.startswith(f"{TARGET}=") for text in overrides):
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
        Request(tuple(overrides)),
        then=lambda spec: calibrate_target(plan_target(spec.target, "bfloat16"), spec.calibration),
    )


def _of_text(path: Path, named: str | None) -> FoundProgram:
    modules = split_modules(_read(path))
    place, note = choose_program(modules, named, str(path))
    return FoundProgram(path, modules[place], note=note)


def _of_dump(path: Path, named: str | None) -> FoundProgram:
    files = sorted(path.glob(DUMPED), key=lambda each: (-each.stat().st_size, each.name))
    if not files:
        what = f"there is no {DUMPED} in it, as --xla_dump_to writes, and no {FOLDER}/{TEXT}"
        raise ConfigError([Problem(str(path), what, GIVE)])
    texts = [_read(each) for each in files]
    place, note = choose_program(texts, named, str(path))
    return FoundProgram(files[place], texts[place], note=note)


def _of_run(run_dir: Path) -> FoundProgram:
    kept = read_artifact(run_dir)
    if kept.built.text is None:
        what = "its step does not fit, so there is no compiled program"
        raise ConfigError([Problem(str(run_dir), what, "see its report.json for what it needs")])
    text = kept.place / TEXT
    return FoundProgram(text, _read(text), _devices_of_run(run_dir / SPEC), kept.built.memory)


def _devices_of_run(path: Path) -> ProgramDevices:
    """Returns the devices in the order of the run's mesh."""
    try:
        spec = yaml.safe_load(_read(path))
        target = plan_target(_part(TargetSpec, spec, "target"), spec["precision"]["compute"])
        target = calibrate_target(target, _part(Calibration, spec, "calibration"))
        mesh = plan_mesh(_part(MeshSpec, spec, "mesh"), target, tuple(spec["device_order"]))
    except (ValidationError, yaml.YAMLError, LookupError, TypeError) as error:
        what = f"is damaged, or of another version of Meshloom: {str(error).splitlines()[0]}"
        raise ConfigError([Problem(str(path), what, "compile it again")]) from None
    return ProgramDevices(mesh.placement)


def _part(kind: Any, spec: Mapping[str, Any], key: str) -> Any:
    return TypeAdapter(kind).validate_json(json.dumps(spec[key]))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error.strerror}", "make it readable")]) from None
    except UnicodeDecodeError:
        raise ConfigError([Problem(str(path), "is not the text of a program: it is not UTF-8", GIVE)]) from None
