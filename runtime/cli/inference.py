"""Runs `meshloom evaluate` and `meshloom generate`: what weights, on any mesh, score and write."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.format import counted
from meshloom.compiler.core.visible import write_out
from meshloom.compiler.declare.compose import Request, read_spec

from ..inference.evaluate import evaluate_weights, prepare_evaluation
from ..inference.generate import Completion, Piece, Prompt
from ..inference.generation_job import GenerationJob, prepare_generation
from ..processes import distributed
from .in_directory import run_together

Events = Iterator[Piece | Completion]
ENDED_BY = {"positions": "the model has no position for another token"}


def evaluate_command(request: Request, flags: argparse.Namespace) -> int:
    """Evaluates, and returns the exit code."""

    def run() -> int:
        job = distributed.together("declaration", lambda: read_spec(request, then=prepare_evaluation))
        console = Console(is_quiet=flags.json or not job.session.processes.is_first)
        evaluation = evaluate_weights(job, console)
        if job.session.processes.is_first and flags.json:
            write_out(json.dumps(evaluation.json, indent=1))
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
