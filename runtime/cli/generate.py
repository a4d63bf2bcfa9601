"""Runs `meshloom generate`: continues prompts, and shows their text while it is made."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.format import counted
from meshloom.compiler.core.visible import write_out
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.run_spec import RunSpec

from ..inference.generate import Completion, Piece
from ..inference.generation_job import GenerationJob, prepare_generation
from ..processes import distributed
from ..processes.devices import start_devices
from ..processes.distributed import Processes, join

ENDED_BY = {"positions": "the model has no position for another token"}


def generate_command(request: Request, flags: argparse.Namespace) -> int:
    """Writes completions to standard output, and all else to standard error. Returns the exit code. Raises ConfigError
    for a mistake, before a weight is read."""
    job = read_spec(request, then=_prepare)
    processes = distributed.current()
    console = Console(is_error=True, is_quiet=not processes.is_first)
    generator = job.open(processes, console)
    events = generator.run(job.prompts, job.plan.spec.generate)
    if processes.is_first:
        (_write_json if flags.json else _write_text)(events, job, console)
    else:
        for _ in events:
            pass
    distributed.leave()
    return 0


def _prepare(spec: RunSpec) -> GenerationJob:
    processes: Processes = join(spec)
    start_devices(spec.target, processes)
    return prepare_generation(spec)


def _write_json(events: Iterator[Piece | Completion], job: GenerationJob, console: Console) -> None:
    """Writes a JSON line for each completion."""
    del job, console
    for event in events:
        if isinstance(event, Completion):
            write_out(json.dumps(asdict(event), ensure_ascii=False))


def _write_text(events: Iterator[Piece | Completion], job: GenerationJob, console: Console) -> None:
    """Writes the text of a single prompt while it comes; of several, each when it is complete. On a terminal, a prompt
    stands before its text, which continues it."""
    is_single = len(job.prompts) == 1
    if is_single:
        _write_prompt(job.prompts[0].text)
    for event in events:
        if isinstance(event, Piece):
            if is_single:
                write_out(event.text, end="")
            continue
        if not is_single:
            console.line(f"prompt {event.number + 1}: {counted(len(event.tokens), 'token')}", style="dim")
            _write_prompt(event.prompt)
            write_out(event.text, end="")
        write_out("")
        if why := ENDED_BY.get(event.ended_by):
            console.line(f"ended after {counted(len(event.tokens), 'token')}: {why}", style="dim")


def _write_prompt(text: str) -> None:
    if sys.stdout.isatty():
        write_out(text, end="")
