"""Runs `meshloom profile` and `meshloom calibrate`: compares traced steps with their predictions."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import yaml

from meshloom.compiler.core.console import Column, Console, Table
from meshloom.compiler.core.errors import ConfigError, Problem, all_of
from meshloom.compiler.core.format import counted
from meshloom.compiler.core.visible import write_out
from meshloom.compiler.declare.hydra_settings import search_path_override
from meshloom.compiler.profile.compare import ProfileReport, calibrate, fit_steps
from meshloom.compiler.report.views.profile import show_profile
from meshloom.compiler.spec.calibration_spec import Calibration
from meshloom.compiler.target.target import calibrate_target

from ..api.inspected import profile_at, read_target
from ..api.judged import Judgement, judge_profile
from ..core.files import replace_text
from ..rundir.profile_files import FOLDER, PREDICTED, read_profile, write_profile
from .results import CalibrateResult
from .words import Words

GROUP = "calibration"


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
    """Writes the calibration of a chip. Raises ConfigError if the runs and profiles cannot calibrate it."""
    overrides = search_path_override(words.overrides, words.flags.get("--config-dir"))
    found = all_of(*(lambda path=path: _profile(path, words, overrides) for path in words.paths))
    reports = [each if isinstance(each, ProfileReport) else each.profile for each in found]
    judged = [each for each in found if isinstance(each, Judgement)]
    what = "profile" if len(judged) == len(found) else "run"
    source = f"{counted(len(found), what)} ({', '.join(map(str, words.paths))}), {datetime.now(UTC):%Y-%m-%d}"
    calibration = calibrate(reports, source)
    if judged and len(judged) == len(found):
        calibration = _fitted(calibration, judged, overrides)
    name = words.flags.get("--name", str(calibration.chip))
    path = Path(words.flags["--to"]) / GROUP / f"{name}.yaml"
    head = f"# {calibration.chip} as measured on {calibration.source}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, head + yaml.safe_dump(calibration.model_dump(mode="json"), sort_keys=False))
    except OSError as error:
        raise ConfigError([Problem("--to", f"{path} cannot be written: {error.strerror}", "name another")]) from None
    if "--json" in words.flags:
        write_out(CalibrateResult(file=str(path), calibration=calibration).model_dump_json(indent=1))
    else:
        _show(calibration, path, Console(off_terminal_width=120))


def _profile(path: Path, words: Words, overrides: Sequence[str]) -> ProfileReport | Judgement:
    """Returns what a run or a profile measured."""
    if (path / FOLDER / PREDICTED).is_file():
        return read_profile(path).report
    profile = profile_at(path)
    if profile is None:
        return read_profile(path).report  # which says what a run directory lacks
    return judge_profile(profile, overrides, words.flags.get("--module"))


def _fitted(calibration: Calibration, judged: Sequence[Judgement], overrides: Sequence[str]) -> Calibration:
    """Returns the calibration with which the steps of these profiles are predicted as long as they were."""
    target = read_target([each for each in overrides if not each.startswith(f"{GROUP}=")])

    def predict(with_it: Calibration) -> list[float] | None:
        steps = [each.predicted_on(calibrate_target(target, with_it)) for each in judged]
        return None if None in steps else [step for step in steps if step is not None]

    return fit_steps(calibration, [each.profile for each in judged], predict)


def _show(calibration: Calibration, path: Path, console: Console) -> None:
    rows: list[list[str]] = [
        [kind, f"{getattr(calibration, kind):.3f}", ""] for kind in ("matmul", "attention", "other")
    ]
    rows += [[kind, f"{link.transfer:.3f}", f"{link.latency:.3f}"] for kind, link in calibration.links.items()]
    columns = (Column(""), Column("measured / predicted", justify="right"), Column("its latency", justify="right"))
    console.line((str(calibration.chip), "bold"), f" as measured on {calibration.source}")
    console.table(Table(columns, rows))
    use = ["meshloom", "explain", "--config-dir", str(path.parents[1]), f"{GROUP}={path.stem}"]
    console.line(f"written to {path}")
    console.command("use it", use)
