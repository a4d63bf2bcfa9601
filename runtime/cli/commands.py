"""The registry of commands: their names, their descriptions, and the functions that run them.

Importing this imports nothing else of Meshloom, and nothing heavy: a command's module is imported when it is run.
Commands share a module where that slows the start of neither: launch adds 0.02 s to train, compile 0.07 s to explain,
`-m` 0.06 s to tune. Others stay apart: importing runs takes 1.31 s of CPU, sweep 1.44, diff 1.68, inspect 1.98.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType

CHECK = "--check"  # a flag of explain


@dataclass(frozen=True)
class Command:
    """A command. place: the function that runs it, as module:function of this package; it returns the exit code.
    takes_overrides: it is called with the request and Hydra's flags, else with the words after its name."""

    name: str
    description: str
    place: str
    takes_overrides: bool = True

    def load(self) -> Callable[..., int]:
        """Imports the command's module, and returns the function that runs it."""
        module, _, function = self.place.partition(":")
        return getattr(import_module(f".{module}", __package__), function)


_ALL = (
    Command("train", "compile for the devices at hand and run", "train:train_command"),
    Command(
        "explain",
        "the plan, in seconds, without compiling: shardings with reasons, memory, arithmetic",
        "ahead:explain_command",
    ),
    Command(
        "compile",
        "ahead of time, for hardware that need not be there: does it fit; a report and an artifact",
        "ahead:compile_command",
    ),
    Command(
        "inspect",
        "the report of any compiled JAX program: MaxText's, one's own jax.jit, an XLA dump",
        "inspect:inspect_command",
        takes_overrides=False,
    ),
    Command(
        "diff",
        "what changed between two runs: config, predicted step, memory, collectives, layouts",
        "diff:diff_command",
        takes_overrides=False,
    ),
    Command(
        "profile",
        "what the traced steps of a run took, beside what was predicted: step, kinds, operations",
        "profile:profile_command",
        takes_overrides=False,
    ),
    Command(
        "calibrate",
        "how much longer work takes on a chip than predicted, from such runs, for later predictions",
        "profile:calibrate_command",
        takes_overrides=False,
    ),
    Command(
        "sweep",
        "the table and the page of a sweep: heat map, Pareto front, loss curves; CSV, Parquet, JSON",
        "show_sweep:sweep_command",
        takes_overrides=False,
    ),
    Command(
        "runs",
        "runs and sweeps on this machine: running, done, stopped, failed and why; last step, loss",
        "runs:runs_command",
        takes_overrides=False,
    ),
    Command(
        "tune",
        "the best configuration for a target: mesh, sharding, remat, microbatches, searched without compiling",
        "sweep:tune_command",
    ),
    Command(
        "launch",
        "the same run on every host of its target: SLURM, Kubernetes, Cloud TPU, or a rehearsal here",
        "train:launch_command",
    ),
    Command("data", "tokenise a corpus of any size into shards, once, for data=tokens to read", "data:data_command"),
)
COMMANDS = MappingProxyType({command.name: command for command in _ALL})
