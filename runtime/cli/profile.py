"""Runs `meshloom profile` and `meshloom calibrate`: compares traced steps of runs with their predictions."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import yaml

from meshloom.compiler.core.console import Column, Console, Table
from meshloom.compiler.core.errors import COMMAND_LINE, ConfigError, Problem, all_of
from meshloom.compiler.core.format import counted
from meshloom.compiler.core.visible import write_out
from meshloom.compiler.profile.calibrate import calibrate
from meshloom.compiler.report.views.profile import show_profile
from meshloom.compiler.spec.calibration_spec import Calibration

from ..core.files import replace_text
from ..rundir.profile_files import read_profile, write_profile
from .words import Syntax, Words, run_words

PROFILE_LINE = "meshloom profile RUN"
PROFILE_USAGE = """\
usage: meshloom profile RUN [--hlo] [--json]

Compares the steps that a run traced (meshloom train profile.steps=[10,13]) with
what the schedule of its program predicts: the step, each kind of compute and of
collectives, and the operations that differ most. Writes profile.json and
profile.html into RUN; the page shows both steps on one time axis.

  --hlo    list each operation, with the name of its HLO instruction
  --json   print all as one JSON object, instead of the tables
"""
PROFILE = Syntax(PROFILE_LINE, PROFILE_USAGE, {"--hlo": "", "--json": ""}, num_paths=range(1, 2))


def profile_command(args: Sequence[str]) -> int:
    """Runs the command line. Returns the exit code: 0, or 2 if there is nothing to compare."""
    return run_words(args, _profile, PROFILE)


def _profile(words: Words) -> None:
    run_dir = words.paths[0]
    profile = read_profile(run_dir)
    files = write_profile(profile, run_dir)
    if "--json" in words.flags:
        write_out(profile.report.model_dump_json(indent=1))
    else:
        show_profile(profile.report, Console(off_terminal_width=120), files=files, is_by_name="--hlo" in words.flags)


CALIBRATE_LINE = "meshloom calibrate RUN... --to DIR"
GROUP = "calibration"
CALIBRATE_USAGE = f"""\
usage: {CALIBRATE_LINE} [--name NAME]

Finds how much longer each kind of compute, and each kind of link, takes on a
chip than predicted, from runs that traced steps on it (meshloom train
profile.steps=[10,13]). Writes a config, which later predictions take by name:

    meshloom explain --config-dir DIR calibration=NAME ...

  --to DIR      a folder of your own configs; writes DIR/{GROUP}/NAME.yaml
  --name NAME   the name of the config; without it, the name of the chip
"""
CALIBRATE = Syntax(CALIBRATE_LINE, CALIBRATE_USAGE, {"--to": "DIR", "--name": "NAME"}, num_paths=range(1, 1000))


def calibrate_command(args: Sequence[str]) -> int:
    """Runs the command line. Returns the exit code: 0, or 2 if the runs cannot calibrate their chip."""
    return run_words(args, _calibrate_and_write, CALIBRATE)


def _calibrate_and_write(words: Words) -> None:
    found = _calibrate(words)
    _show(found, _write(found, words), Console(off_terminal_width=120))


def _calibrate(words: Words) -> Calibration:
    if "--to" not in words.flags:
        raise ConfigError(
            [Problem(COMMAND_LINE, "--to is missing: where the calibration goes", f"type: {CALIBRATE_LINE}")]
        )
    profiles = all_of(*(lambda path=path: read_profile(path) for path in words.paths))
    names = ", ".join(map(str, words.paths))
    source = f"{counted(len(profiles), 'run')} ({names}), {datetime.now(UTC):%Y-%m-%d}"
    return calibrate([profile.report for profile in profiles], source)


def _write(calibration: Calibration, words: Words) -> Path:
    name = words.flags.get("--name", str(calibration.chip))
    path = Path(words.flags["--to"]) / GROUP / f"{name}.yaml"
    head = f"# {calibration.chip} as measured on {calibration.source}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, head + yaml.safe_dump(calibration.model_dump(mode="json"), sort_keys=False))
    except OSError as error:
        raise ConfigError([Problem("--to", f"{path} cannot be written: {error.strerror}", "name another")]) from None
    return path


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
