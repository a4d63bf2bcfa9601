"""Runs `meshloom profile` and `meshloom calibrate`: compares traced steps with predictions, and learns from them."""

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import yaml

from meshloom.compiler.core.console import Column, Console, Table
from meshloom.compiler.core.errors import ConfigError, Problem, all_of, raise_if_any, use_one_of
from meshloom.compiler.core.format import counted
from meshloom.compiler.core.visible import write_out
from meshloom.compiler.declare.hydra_settings import search_path_override
from meshloom.compiler.profile.compare import ProfileReport, calibrate, fit_steps
from meshloom.compiler.report.views.profile import show_profile
from meshloom.compiler.spec.calibration_spec import GROUP, UNCALIBRATED, Calibration
from meshloom.compiler.spec.own_calibrations import own_files, own_folder, read_calibration
from meshloom.compiler.target.target import calibrate_target

from ..api.inspected import ProgramRequest, profile_at, read_target
from ..api.judged import Judgement, judge_profile
from ..core.files import replace_text
from ..rundir.profile_files import FOLDER, PREDICTED, read_profile, write_profile
from .results import CalibrateResult
from .words import Words


def profile_command(words: Words) -> None:
    """Compares the traced steps of a run with their prediction. Raises ConfigError if it traced none."""
    run_dir = words.paths[0]
    profile = read_profile(run_dir)
    files = write_profile(profile, run_dir)
    if "--json" in words.flags:
        write_out(profile.report.model_dump_json(indent=1))
    else:
        show_profile(profile.report, Console(off_terminal_width=120), files=files, is_by_name="--hlo" in words.flags)


def calibrate_command(words: Words) -> None:
    """Keeps or writes the calibration of a chip; shows or removes what is kept. Raises ConfigError if the runs and
    profiles cannot calibrate a chip."""
    flags, console = words.flags, Console(off_terminal_width=120)
    raise_if_any(_problems_of_flags(words))
    if "--remove" in flags:
        kept = [_removed(flags["--remove"])]
    elif not words.paths:
        kept = [CalibrateResult(file=str(file), calibration=read_calibration(file)) for file in own_files()]
    else:
        _calibrate(words, console)
        return
    if "--json" in flags:
        write_out(json.dumps([each.model_dump(mode="json") for each in kept], indent=1))
        return
    for each in kept:
        does = "removed" if "--remove" in flags else "kept"
        console.wrapped((str(each.calibration.chip), "bold"), f" {does} {each.file}, {each.calibration.describe()}")
    if not kept:
        console.wrapped(f"nothing is kept in {own_folder() / GROUP}: name runs or profiles to calibrate a chip")


def _problems_of_flags(words: Words) -> Iterator[Problem]:
    flags = words.flags
    if "--name" in flags and "--to" not in flags:
        yield Problem("--name", "what is kept for a chip has its name", "add --to DIR, or leave it out")
    if words.paths and "--remove" in flags:
        yield Problem(
            "--remove", "RUN is named, too", "first remove, then calibrate: a new calibration replaces the old"
        )
    if not words.paths and (unread := [*words.overrides, *(flag for flag in ("--to", "--module") if flag in flags)]):
        yield Problem(unread[0], "no RUN is named that it is for", "name runs or profiles after it, or leave it out")


def _removed(chip: str) -> CalibrateResult:
    """Removes the calibration that is kept for a chip. Raises ConfigError if there is none."""
    files = {file.stem: file for file in own_files()}
    if chip not in files:
        fix = use_one_of(chip, files) if files else f"there is none in {own_folder() / GROUP}"
        raise ConfigError([Problem("--remove", f"no calibration of {chip} is kept", fix)])
    try:
        found = CalibrateResult(file=str(files[chip]), calibration=read_calibration(files[chip]))
    except ConfigError:  # a damaged file is removed, too
        found = CalibrateResult(file=str(files[chip]), calibration=UNCALIBRATED.model_copy(update={"chip": chip}))
    try:
        files[chip].unlink()
    except OSError as error:
        what = f"{files[chip]} cannot be removed: {error.strerror}"
        raise ConfigError([Problem("--remove", what, "see who may write there")]) from None
    return found


def _calibrate(words: Words, console: Console) -> None:
    typed = search_path_override(words.overrides, words.flags.get("--config-dir"))
    # What is kept for the chip is replaced; a calibration that is named is corrected.
    overrides = typed if any(text.startswith(f"{GROUP}=") for text in typed) else [*typed, f"{GROUP}=none"]
    found = all_of(*(lambda path=path: _profile(path, words, overrides) for path in words.paths))
    reports = [each if isinstance(each, ProfileReport) else each.profile for each in found]
    judged = [each for each in found if isinstance(each, Judgement)]
    what = "profile" if len(judged) == len(found) else "run"
    source = f"{counted(len(found), what)} ({', '.join(map(str, words.paths))}), {datetime.now(UTC):%Y-%m-%d}"
    calibration, note = calibrate(reports, source), ""
    if judged and len(judged) == len(found):
        calibration, note = _fitted(calibration, judged, overrides)
    is_own = "--to" not in words.flags
    folder = own_folder() if is_own else Path(words.flags["--to"])
    if is_own and not folder.is_absolute():
        what = "there is no home directory to keep it in"
        raise ConfigError([Problem("--to", what, "add --to DIR, or set XDG_CONFIG_HOME to a folder")])
    path = folder / GROUP / f"{words.flags.get('--name', str(calibration.chip))}.yaml"
    head = f"# {calibration.chip} as measured on {calibration.source}\n"
    notes = [note] if note else []
    if is_own and path.is_file():
        notes.append(f"it replaces what was kept: {_summary(path)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, head + yaml.safe_dump(calibration.model_dump(mode="json"), sort_keys=False))
    except OSError as error:
        where, fix = ("the calibration", "name a folder by --to DIR") if is_own else ("--to", "name another")
        raise ConfigError([Problem(where, f"{path} cannot be written: {error.strerror}", fix)]) from None
    if "--json" in words.flags:
        result = CalibrateResult(file=str(path), calibration=calibration, notes=tuple(notes))
        write_out(result.model_dump_json(indent=1))
        return
    _show(calibration, console)
    for text in notes:
        console.wrapped((f"note: {text}", "yellow"))
    if is_own:
        console.wrapped(f"kept in {path}: explain, compile, inspect, tune and guard use it for {calibration.chip}")
        console.wrapped(f"predict without it by {GROUP}=none, or remove it: "
                        f"meshloom calibrate --remove {calibration.chip}")  # fmt: skip
    else:
        use = ["meshloom", "explain", "--config-dir", str(folder), f"{GROUP}={path.stem}"]
        console.line(f"written to {path}")
        console.command("use it", use)


def _summary(path: Path) -> str:
    try:
        return read_calibration(path).describe()
    except ConfigError:
        return "a file that cannot be read"


def _profile(path: Path, words: Words, overrides: Sequence[str]) -> ProfileReport | Judgement:
    """Returns what a run or a profile measured."""
    if (path / FOLDER / PREDICTED).is_file():
        return read_profile(path).report
    profile = profile_at(path)
    if profile is None:
        return read_profile(path).report  # which says what a run directory lacks
    return judge_profile(profile, ProgramRequest(tuple(overrides), words.flags.get("--module")))


def _fitted(calibration: Calibration, judged: Sequence[Judgement], overrides: Sequence[str]) -> tuple[Calibration, str]:
    """Returns the calibration with which the steps of these profiles are predicted as long as they were, and what was
    not reached."""
    target = read_target([*(each for each in overrides if not each.startswith(f"{GROUP}=")), f"{GROUP}=none"])

    def predict(with_it: Calibration) -> list[float] | None:
        steps = [each.predicted_on(calibrate_target(target, with_it)) for each in judged]
        return None if None in steps else [step for step in steps if step is not None]

    return fit_steps(calibration, [each.profile for each in judged], predict)


def _show(calibration: Calibration, console: Console) -> None:
    rows: list[list[str]] = [
        [kind, f"{getattr(calibration, kind):.3f}", ""] for kind in ("matmul", "attention", "other")
    ]
    rows += [[kind, f"{link.transfer:.3f}", f"{link.latency:.3f}"] for kind, link in calibration.links.items()]
    columns = (Column(""), Column("measured / predicted", justify="right"), Column("its latency", justify="right"))
    console.line((str(calibration.chip), "bold"), f" as measured on {calibration.source}")
    console.table(Table(columns, rows))
