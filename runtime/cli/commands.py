"""The registry of commands: what there is, what it is called, and where it is.

Importing this imports nothing else of Meshloom, and nothing heavy: a command's module is imported when it is run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType

CHECK = "--check"  # a flag of explain


@dataclass(frozen=True)
class Command:
    """place: the function that runs it, as module:function of this package. takes_overrides: it is then called with the
    request and Hydra's flags, else with the words after its name; either way it returns the exit code."""

    name: str
    description: str
    place: str
    takes_overrides: bool = True

    def load(self) -> Callable[..., int]:
        """Imports the command and all that it needs."""
        module, _, function = self.place.partition(":")
        return getattr(import_module(f".{module}", __package__), function)


_ALL = (
    Command("train", "compile for the devices at hand and run", "train:train_command"),
    Command(
        "explain",
        "the plan, in seconds, without compiling: shardings with reasons, memory, arithmetic",
        "explain:explain_command",
    ),
    Command(
        "compile",
        "ahead of time, for hardware that need not be there: does it fit; a report and an artifact",
        "compile:compile_command",
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
        "calibrate:calibrate_command",
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
        "tune:tune_command",
    ),
    Command(
        "launch",
        "the same run on every host of its target: SLURM, Kubernetes, Cloud TPU, or a rehearsal here",
        "launch:launch_command",
    ),
    Command("data", "tokenise a corpus of any size into shards, once, for data=tokens to read", "data:data_command"),
)
COMMANDS = MappingProxyType({command.name: command for command in _ALL})
