"""Chooses a run directory, the same in all processes, locks it for one run, and writes the declaration into it.

Hydra names it by the clock, and the clocks of hosts differ.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import yaml

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.places import is_url
from meshloom.compiler.declare.compose import Request, hydra_run_dir
from meshloom.compiler.declare.hydra_settings import RUN_DIR
from meshloom.compiler.declare.overrides import overridden_key, override
from meshloom.compiler.plan import Plan
from meshloom.compiler.report.explain import plan_as_json
from meshloom.compiler.report.views.page import render_page
from meshloom.compiler.report.views.timeline import chrome_trace
from meshloom.compiler.schema import Event, Report

from ..core.files import LOCK, locked, replace_json, replace_text
from ..processes.distributed import Processes, together
from .folders import PLAN, REPORT, SPEC

SECONDS_UNTIL_SEEN = 30  # a directory of another host appears late on some network file systems


def check_run_dir(request: Request) -> None:
    """Raises ConfigError if the named run directory is in use, before Hydra overwrites the record of the run."""
    is_named = RUN_DIR in map(overridden_key, request.overrides)
    if is_named or request.search_path or request.config_path:  # or a config of the user may name it
        check_is_free(as_typed(hydra_run_dir(request)))


def as_typed(run_dir: Path) -> Path:
    """Returns a run directory relative to the working directory, if it is below it."""
    return run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir


def in_shared_run_dir(request: Request, processes: Processes) -> Request:
    """Returns the request with the run directory of process 0, which creates it. Only process 0 writes Hydra's record.

    Raises ConfigError in all processes if it cannot be created, or one of them does not see it.
    """
    if processes.count == 1:
        return request
    run_dir = together("run directory", lambda: _made_by_first(request, processes))
    kept = [text for text in request.overrides if overridden_key(text) not in (RUN_DIR, "hydra.output_subdir")]
    record = [] if processes.is_first else ["hydra.output_subdir=null"]
    return replace(request, overrides=(*kept, override(RUN_DIR, str(run_dir)), *record))


def _made_by_first(request: Request, processes: Processes) -> Path:
    if not processes.is_first:
        told = processes.from_first("run_dir")
        run_dir, deadline = Path(told or "."), time.monotonic() + SECONDS_UNTIL_SEEN
        while not run_dir.is_dir():
            if time.monotonic() > deadline:
                what = f"process {processes.index} does not see {run_dir}, which process 0 made"
                raise ConfigError([Problem("hydra.run.dir", what, "name a directory that all hosts share")])
            time.sleep(0.1)
        return run_dir
    made = ""  # sent in any case: the others wait for it
    try:
        run_dir = hydra_run_dir(request)
        run_dir.mkdir(parents=True, exist_ok=True)
        made = str(run_dir)
        return run_dir
    finally:
        processes.from_first("run_dir", made)


def write_declaration(plan: Plan, run_dir: Path) -> None:
    """Writes spec.yaml, the resolved declaration, and plan.json, the plan that was made from it."""
    replace_text(run_dir / SPEC, yaml.safe_dump(plan.spec.as_written(), sort_keys=False))
    replace_json(run_dir / PLAN, plan_as_json(plan, chosen_here=plan.spec.chosen_here))


def write_report(
    report: Report,
    plan: Plan | None,
    run_dir: Path,
    *,
    events: Sequence[Event],
    measured: Mapping[str, Any] | None = None,
) -> tuple[Path, ...]:
    """Writes report.json, timeline.json and report.html. Returns their paths, beginning with the one to open.

    plan: None for a program without a declaration. measured: as in `render_page`. All three are rendered before one is
    written, and report.json comes last: if it is there, the others belong to it.
    """
    texts = {
        "report.html": render_page(report, events, plan, measured),
        "timeline.json": json.dumps(chrome_trace(report, events), separators=(",", ":")) + "\n",
        REPORT: report.model_dump_json(indent=1) + "\n",
    }
    for name, text in texts.items():
        replace_text(run_dir / name, text)
    return tuple(run_dir / name for name in texts)


@contextmanager
def only_run_in(run_dir: Path) -> Iterator[None]:
    """Locks the directory of a run or a compile within the `with`; process 0 does it for all processes."""
    if jax.process_index() != 0:
        yield
        return
    with locked(run_dir, _busy(run_dir)):
        yield


def check_is_free(run_dir: Path) -> None:
    """Raises ConfigError if a run or a compile holds the directory. Creates nothing."""
    if (run_dir / LOCK).exists():
        with locked(run_dir, _busy(run_dir)):
            pass


@contextmanager
def only_run_that_saves_in(directory: str | None) -> Iterator[None]:
    """Locks a folder of checkpoints outside the run directory within the `with`; there are no locks behind a URL."""
    if directory is None or is_url(directory) or jax.process_index() != 0:
        yield
        return
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"{folder} cannot be made: {error.strerror}"
        raise ConfigError([Problem("checkpoint.directory", what, "name a folder that this process may make")]) from None
    fix = "wait for its end, or name another folder"
    with locked(folder, Problem("checkpoint.directory", f"another run saves its checkpoints in {folder}", fix)):
        yield


def _busy(run_dir: Path) -> Problem:
    fix = "wait for its end, stop it, or choose another hydra.run.dir"
    return Problem("hydra.run.dir", f"another run is in progress in {run_dir}", fix)
