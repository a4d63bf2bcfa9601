"""Runs `meshloom profile` and `meshloom calibrate`: compares traced steps of runs with their predictions."""

from datetime import UTC, datetime
from pathlib import Path

import yaml

from meshloom.compiler.core.console import Column, Console, Table
from meshloom.compiler.core.errors import ConfigError, Problem, all_of
from meshloom.compiler.core.format import counted
from meshloom.compiler.core.visible import write_out
from meshloom.compiler.profile.compare import calibrate
from meshloom.compiler.report.views.profile import show_profile
from meshloom.compiler.spec.calibration_spec import Calibration

from ..core.files import replace_text
from ..rundir.profile_files import read_profile, write_profile
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
    """Writes the calibration of a chip. Raises ConfigError if the runs cannot calibrate it."""
    profiles = all_of(*(lambda path=path: read_profile(path) for path in words.paths))
    names = ", ".join(map(str, words.paths))
    source = f"{counted(len(profiles), 'run')} ({names}), {datetime.now(UTC):%Y-%m-%d}"
    calibration = calibrate([profile.report for profile in profiles], source)
    name = words.flags.get("--name", str(calibration.chip))
    path = Path(words.flags["--to"]) / GROUP / f"{name}.yaml"
    head = f"# {calibration.chip} as measured on {calibration.source}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, head + yaml.safe_dump(calibration.model_dump(mode="json"), sort_keys=False))
    except OSError as error:
        raise ConfigError([Problem("--to", f"{path} cannot be written: {error.strerror}", "name another")]) from None
    _show(calibration, path, Console(off_terminal_width=120))


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
