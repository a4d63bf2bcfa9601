"""`meshloom profile RUN`: what the traced steps of a run took, beside what was predicted."""

from collections.abc import Sequence

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.visible import write_out
from meshloom.compiler.report.views.profile import show_profile

from ..rundir.profile_files import read_profile, write_profile
from .words import Words, run_words

LINE = "meshloom profile RUN"
USAGE = """\
usage: meshloom profile RUN [--hlo] [--json]

What the steps took that a run traced (meshloom train profile.steps=[10,13]), beside what the schedule of its program
predicts: the step, each kind of compute and of collectives, and the operations that differ most. Writes profile.json
and profile.html into RUN; the page has the predicted and the measured step on one time axis.

  --hlo    each operation by itself, with the name of its HLO instruction
  --json   all of it for tools, as one JSON object, instead of the tables
"""
FLAGS = {"--hlo": "", "--json": ""}


def profile_command(args: Sequence[str]) -> int:
    """Runs the command line and returns the exit code: 0, or 2 if there is nothing to compare."""
    return run_words(args, _profile, flags=FLAGS, num_paths=range(1, 2), usage=USAGE, line=LINE)


def _profile(words: Words) -> None:
    run_dir = words.paths[0]
    profile = read_profile(run_dir)
    files = write_profile(profile, run_dir)
    if "--json" in words.flags:
        write_out(profile.report.model_dump_json(indent=1))
    else:
        show_profile(profile.report, Console(off_terminal_width=120), files=files, is_by_name="--hlo" in words.flags)
