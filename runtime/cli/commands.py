"""The registry of commands: their names, their descriptions, and the functions that run them.

Importing this imports nothing else of Meshloom, and nothing heavy: a command's module is imported when it is run.
Commands share a module where that slows the start of neither: launch adds 0.02 s to train, `-m` 0.06 s to tune.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType

CHECK = "--check"  # a flag of explain
SHOW = "--show"  # a flag of data
JSON = "--json"  # a flag of evaluate and generate


@dataclass(frozen=True)
class Command:
    """A command. place: the function that runs it, as module:function of this package; it returns the exit code.
    takes_overrides: it is called with the request and Hydra's flags, else with the words after its name. opens_weights:
    its first word is a run or a folder of published weights, which the overrides change. joins_processes: it may run in
    several processes, which stop together. flags: its own flags, each with what it does, besides those of Hydra.
    section: the section of the config whose keys it takes without its name."""

    name: str
    description: str
    place: str
    takes_overrides: bool = True
    opens_weights: bool = False
    joins_processes: bool = False
    flags: tuple[tuple[str, str], ...] = ()
    section: str = ""

    def load(self) -> Callable[..., int]:
        """Imports the command's module, and returns the function that runs it."""
        module, _, function = self.place.partition(":")
        return getattr(import_module(f".{module}", __package__), function)


_ALL = (
    Command("train", "compile for the attached devices, and run", "train:train_command", joins_processes=True),
    Command(
        "explain",
        "show the plan in seconds, without compiling: layouts, memory, time",
        "explain:explain_command",
        flags=((CHECK, "exit code 3 if the step does not fit, by the estimate"),),
    ),
    Command("compile", "compile ahead of time, without the hardware: report and artifact", "compile:compile_command"),
    Command(
        "evaluate",
        "show the loss of a run's weights, or of published ones, on any data",
        "evaluate:evaluate_command",
        opens_weights=True,
        joins_processes=True,
        flags=((JSON, "print the losses as one JSON object"),),
        section="evaluation",
    ),
    Command(
        "inspect",
        "report on any compiled JAX program, whoever compiled it",
        "inspect:inspect_command",
        takes_overrides=False,
    ),
    Command(
        "diff",
        "compare two runs: config, step, memory, collectives, layouts",
        "diff:diff_command",
        takes_overrides=False,
    ),
    Command(
        "profile",
        "compare traced steps of a run with their prediction",
        "profile:profile_command",
        takes_overrides=False,
    ),
    Command(
        "calibrate",
        "correct later predictions for a chip by traced runs",
        "profile:calibrate_command",
        takes_overrides=False,
    ),
    Command(
        "sweep",
        "show a sweep, also while it runs: table, page, CSV, Parquet, JSON",
        "show_sweep:sweep_command",
        takes_overrides=False,
    ),
    Command(
        "runs",
        "list runs and sweeps on this machine: state, last step, loss",
        "runs:runs_command",
        takes_overrides=False,
    ),
    Command(
        "generate",
        "continue a prompt with the weights of a run or a published model",
        "generate:generate_command",
        opens_weights=True,
        joins_processes=True,
        flags=((JSON, "a JSON line for each prompt, when its text is complete"),),
        section="generate",
    ),
    Command(
        "export",
        "write the weights of a run as transformers and vLLM read them",
        "export:export_command",
        opens_weights=True,
        section="export",
    ),
    Command("tune", "search for the best mesh, sharding and remat, without compiling", "sweep:tune_command"),
    Command("launch", "run on every host: SLURM, Kubernetes, Cloud TPU, or a rehearsal", "train:launch_command"),
    Command(
        "data",
        "tokenise a corpus into shards, once, for data=tokens to read",
        "data:data_command",
        flags=((SHOW, "show the first document and what of it is trained on, and write nothing"),),
    ),
)
SWEEP = Command("-m", "run a command for each combination of values", "sweep:run_sweep")
COMMANDS = MappingProxyType({command.name: command for command in _ALL})
