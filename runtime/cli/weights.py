"""Runs `meshloom evaluate`, `generate` and `export`: what weights score and write, on any mesh."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import jax

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.format import counted, human_bytes
from meshloom.compiler.core.visible import write_out
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.parallel.encodings import float32_params
from meshloom.models.adapter import merged
from meshloom.models.contract import Params

from ..inference.evaluate import evaluate_weights, prepare_evaluation
from ..inference.generate import Completion, Piece, Prompt
from ..inference.generation_job import GenerationJob, prepare_generation
from ..inference.open_weights import open_weights, start_session
from ..processes import distributed
from ..weights.export import prepare_export, published_origin, run_export
from ..weights.write import check_peft, write_adapter
from .in_directory import run_together
from .results import ExportResult

Events = Iterator[Piece | Completion]
ENDED_BY = {"positions": "the model has no position for another token"}


def evaluate_command(request: Request, flags: argparse.Namespace) -> int:
    """Evaluates, and returns the exit code."""

    def run() -> int:
        job = distributed.together("declaration", lambda: read_spec(request, then=prepare_evaluation))
        console = Console(is_quiet=flags.json or not job.session.processes.is_first)
        evaluation = evaluate_weights(job, console)
        if job.session.processes.is_first:
            flags.result = evaluation.json
        for line in evaluation.lines:
            console.wrapped(line)
        return 0

    return run_together(run)


def generate_command(request: Request, flags: argparse.Namespace) -> int:
    """Writes completions to standard output, and all else to standard error. Returns the exit code."""

    def run() -> int:
        job = distributed.together("declaration", lambda: read_spec(request, then=prepare_generation))
        is_first = job.session.processes.is_first
        console = Console(is_error=True, is_quiet=not is_first)
        events = job.run(console)
        if is_first and not flags.json:
            _write_text(events, job, console)
        for event in events:
            if is_first and isinstance(event, Completion):
                write_out(json.dumps(asdict(event), ensure_ascii=False))
        return 0

    return run_together(run)


def _write_text(events: Events, job: GenerationJob, console: Console) -> None:
    """Writes the text of a single prompt while it comes; of several, each when it is complete. On a terminal, a prompt
    stands before its text, which continues it."""
    is_single, has_begun = len(job.prompts) == 1, False
    for event in events:
        prompt = job.prompts[event.number]
        if is_single and not has_begun:
            _write_prompt(prompt)
            has_begun = True
        if isinstance(event, Piece):
            if is_single:
                write_out(event.text, end="")
            continue
        if not is_single:
            console.line(f"prompt {event.number + 1}: {counted(len(event.tokens), 'token')}", style="dim")
            _write_prompt(prompt)
            write_out(event.text, end="")
        write_out("")
        if why := ENDED_BY.get(event.ended_by):
            console.line(f"ended after {counted(len(event.tokens), 'token')}: {why}", style="dim")


def _write_prompt(prompt: Prompt) -> None:
    """Writes a text to continue, on a terminal; an answer does not continue the chat's text."""
    if sys.stdout.isatty() and not prompt.is_chat:
        write_out(prompt.text, end="")


def export_command(request: Request, flags: argparse.Namespace) -> int:
    """Writes the folder. Raises ConfigError for a mistake, before anything is written."""
    written, export = read_spec(
        request,
        then=lambda spec: (
            spec.export,
            partial(export_peft, spec, check_peft(spec))
            if spec.export.format == "peft"
            else partial(run_export, prepare_export(spec, open_merged)),
        ),
    )
    export(Console())
    if flags.json:
        assert written.directory is not None, "it was exported there"
        files = {file.name: file.stat().st_size for file in sorted(Path(written.directory).iterdir())}
        result = ExportResult(directory=str(written.directory), format=written.format, files=files)
        flags.result = result.model_dump(mode="json")
    return 0


def export_peft(spec: RunSpec, folder: Path, console: Console) -> None:
    """Writes the adapter of a run as a PEFT folder, with the place of its base by name."""
    session = start_session(spec)
    opened = open_weights(session, console)
    origin = published_origin(opened.base) if opened.base else None
    model_type = origin.model_type if origin else None
    num_bytes = write_adapter(folder, session.plan, opened.params, opened.base, model_type)
    console.line(f"exported {session.plan.adapter} of step {opened.step}, {human_bytes(num_bytes)}: {folder}")


def open_merged(spec: RunSpec) -> Params:
    """Returns the parameters of a run that trained an adapter, merged with those of its base, on the devices."""
    session = start_session(spec)
    opened = open_weights(session, Console())

    def merge(params: Params) -> Params:
        return merged(session.plan.model, float32_params(session.plan.weights, params))

    return jax.jit(merge)(opened.params)  # in float32, whatever a frozen base is stored in: it is rounded once
