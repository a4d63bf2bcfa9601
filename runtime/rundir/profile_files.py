"""Reads the traces of a run and the prediction for their program, and writes the comparison.

RUN/profile/process-N/plugins/profile/TIME/HOST.xplane.pb     from `jax.profiler`, for any tool that reads it
RUN/profile/train.hlo.txt, predicted.json                     the traced program, and its prediction
RUN/profile.json, profile.html                                from `meshloom profile`
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from meshloom.compiler.core.errors import ConfigError, Problem, all_of
from meshloom.compiler.profile.compare import ProfileReport, compare, typical_execution
from meshloom.compiler.profile.planes import PlanesError
from meshloom.compiler.profile.prediction import Prediction
from meshloom.compiler.profile.trace import Trace, read_trace
from meshloom.compiler.report.views.profile import render_profile

from ..core.files import replace_text
from .folders import check_directory

FOLDER = "profile"
TEXT, PREDICTED = "train.hlo.txt", "predicted.json"
REPORT, PAGE = "profile.json", "profile.html"
FIX = "train with profile.steps=[10,13], or other steps"


@dataclass(frozen=True)
class RunProfile:
    """A run's traces, one for each process, its prediction, and both compared."""

    traces: tuple[Trace, ...]
    prediction: Prediction
    report: ProfileReport


def place_of(run_dir: Path, process: int) -> Path:
    """Returns the folder of one process's traces: processes of one host would overwrite each other's files."""
    return run_dir / FOLDER / f"process-{process}"


def read_profile(run_dir: Path) -> RunProfile:
    """Returns the profile of a run directory's traced steps. Raises ConfigError if it has none or is damaged."""
    check_directory(run_dir, "name the run directory of a `meshloom train`")
    prediction, files = all_of(lambda: _prediction(run_dir / FOLDER / PREDICTED), lambda: _newest_traces(run_dir))
    traces = all_of(
        *(lambda path=path, process=process: _trace(path, prediction, process) for process, path in files.items())
    )
    if not any(trace.executions for trace in traces):
        what = f"its trace has no run of the program {prediction.module}"
        raise ConfigError([Problem(str(run_dir / FOLDER), what, FIX)])
    return RunProfile(traces, prediction, compare(traces, prediction))


def write_profile(profile: RunProfile, run_dir: Path) -> tuple[Path, ...]:
    """Writes profile.json and profile.html, both rendered before one is written. Returns their paths, beginning with
    the one to open."""
    texts = {
        PAGE: render_profile(profile.report, profile.prediction, typical_execution(profile.traces)),
        REPORT: profile.report.model_dump_json(indent=1) + "\n",
    }
    for name, text in texts.items():
        replace_text(run_dir / name, text)
    return tuple(run_dir / name for name in texts)


def _prediction(path: Path) -> Prediction:
    try:
        return Prediction.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError([Problem(str(path), "there is no such file: no step of this run was traced", FIX)]) from None
    except OSError as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error.strerror}", "make it readable")]) from None
    except ValidationError:
        what = "is damaged, or of another version of Meshloom"
        raise ConfigError([Problem(str(path), what, f"{FIX}, with this version")]) from None


def _newest_traces(run_dir: Path) -> Mapping[int, Path]:
    """Returns the newest trace of each process that has one."""
    found: dict[int, Path] = {}
    for place in (run_dir / FOLDER).glob("process-*"):
        if number := re.fullmatch(r"process-(\d+)", place.name):
            traces = sorted(place.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.parent.name)
            found |= {int(number[1]): traces[-1]} if traces else {}
    if not found:
        raise ConfigError([Problem(str(run_dir / FOLDER), "there is no trace in it", FIX)])
    return dict(sorted(found.items()))


def _trace(path: Path, prediction: Prediction, process: int) -> Trace:
    try:
        return read_trace(path.read_bytes(), prediction.module, process)
    except (OSError, PlanesError) as error:
        what = f"is not a trace that can be read: {str(error).splitlines()[0]}"
        raise ConfigError([Problem(str(path), what, FIX)]) from None
