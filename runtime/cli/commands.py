"""The registry of commands: their names, their descriptions, and the functions that run them.

Importing this imports nothing else of Meshloom, and nothing heavy: a command's module is imported when it is run.
Commands share a module where that slows the start of neither: launch adds 0.02 s to train, `-m` 0.06 s to tune.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Flag:
    """A flag of a command. value: the name of its value; empty if it takes none."""

    name: str
    does: str
    value: str = ""
    is_required: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.value}".rstrip()


@dataclass(frozen=True)
class Command:
    """A command. place: the function that runs it, as module:function of this package. about: what its help says below
    the usage. paths: the names of the paths that it takes: `RUN_A RUN_B`, `[DIR]`, `RUN...`, and `target=NAME` if it
    takes overrides too. Such a command is called with its Words; any other is called with the request and Hydra's
    flags, and returns the exit code. opens_weights: its first word is a run or a folder of published weights, which the
    overrides change. joins_processes: it may run in several processes, which stop together. flags: its own flags,
    besides those of Hydra. section: the section of the config whose keys it takes without its name. takes_any_words:
    what is not a flag of its own is not read here, as a whole command of another tool. streams: with `--json` it prints
    results while it runs, instead of one in the end. predicts: it runs no step, so the calibrations that the user keeps
    count."""

    name: str
    description: str
    place: str
    about: str = ""
    paths: str = ""
    opens_weights: bool = False
    joins_processes: bool = False
    flags: tuple[Flag, ...] = ()
    section: str = ""
    takes_any_words: bool = False
    streams: bool = False
    predicts: bool = False

    @property
    def line(self) -> str:
        """Returns the command with all that it needs, on one line."""
        return " ".join(["meshloom", self.name, self.paths, *(str(flag) for flag in self.flags if flag.is_required)])

    def load(self) -> Callable[..., Any]:
        """Imports the command's module, and returns the function that runs it."""
        module, _, function = self.place.partition(":")
        return getattr(import_module(f".{module}", __package__), function)


JSON = Flag("--json", "print one JSON object instead of text")
SAID = Flag("--json", "print one JSON object in the end; all else goes to standard error")
_ALL = (
    Command(
        "train",
        "compile for the attached devices, and run",
        "train:train_command",
        joins_processes=True,
        flags=(SAID,),
    ),
    Command(
        "explain",
        "show the plan in seconds, without compiling: layouts, memory, time",
        "explain:explain_command",
        predicts=True,
        flags=(
            Flag("--check", "exit code 3 if the step does not fit, by the estimate"),
            Flag("--json", "print plan.json instead of text"),
        ),
    ),
    Command(
        "compile",
        "compile ahead of time, without the hardware: report and artifact",
        "compile:compile_command",
        predicts=True,
        flags=(Flag("--json", "print report.json in the end; all else goes to standard error"),),
    ),
    Command(
        "check",
        "prove that the declared step computes what one device computes",
        "check:check_command",
        """\
Cuts the declared model and mesh down to a program that simulated devices run in
seconds, with the same rules of sharding, strategies, schedule, remat and
precision, and compares it with one device in float32: loss, gradients, update,
microbatches, context, stages, packing, padding, checkpoint, export. The exit
code is 0, or 11 if a line fails (docs/check.md).
""",
        flags=(JSON,),
    ),
    Command(
        "evaluate",
        "show the loss of a run's weights, or of published ones, on any data",
        "weights:evaluate_command",
        opens_weights=True,
        joins_processes=True,
        flags=(Flag("--json", "print the losses as one JSON object"),),
        section="evaluation",
    ),
    Command(
        "inspect",
        "report on any compiled JAX program, or judge a profile of one",
        "inspect:inspect_command",
        """\
Reports what a compiled step does, whoever wrote and compiled it: memory,
collectives with their links, hidden and exposed time, the predicted step,
findings. Of a profile it says what each operation took, and what was predicted.
PROGRAM is one of

  FILE     the text of `compiled.as_text()`, or an HloProto (*.hlo.pb)
  DIR      a dump of XLA (--xla_dump_to=DIR); its largest program is read
  RUN      a directory of `meshloom compile`, or its artifact; it has its target
  PROFILE  *.xplane.pb of jax.profiler, or a directory with some; with TEXT, the
           program's text, *.trace.json.gz too; XProf's hlo_stats, CSV or JSON

target=NAME names the chips that it was compiled for, such as v5p-128 or
h100-64; target.num_slices=2 and calibration=NAME work too. Writes report.json,
timeline.json and report.html; `meshloom diff` compares two such directories. Of
a profile, profile.json too. Each file may be compressed by gzip.
""",
        "PROGRAM [TEXT] target=NAME",
        flags=(
            Flag("--module", "the program to read; without it, the largest, or the one that a profile is of", "NAME"),
            Flag("--trips", "iterations of one loop, or of all whose number is not stated; without it, 1", "[LOOP=]N"),
            Flag(
                "--taken",
                "share of executions, 0 to 1, in which a conditional takes the branch that ends last; without it, 1",
                "[NAME=]P",
            ),
            Flag("--to", "where the files go; without it, a new directory in outputs/", "DIR"),
            Flag("--json", "print report.json, or profile.json of a profile, instead of the summary"),
            Flag("--config-dir", "your own configs: targets, calibrations", "DIR"),
        ),
    ),
    Command(
        "import",
        "turn a MaxText, torchtitan or Megatron run into overrides",
        "import_peer:import_command",
        """\
Reads what declares a run of another trainer, and prints the same run as
overrides of Meshloom. TRAINER is maxtext, torchtitan or megatron (Megatron-LM
and Megatron Bridge). What follows is one of

  FILE      its own config (yml, toml), a script with the command, a page with
            it, or a manifest of Kubernetes; keys after it replace its own
  COMMAND   the command itself, in quotes or as it is
  KEY=VALUE its keys alone, as its command line has them

target=NAME names the chips, where nothing else does. Each key has an override,
is named as without effect here, or is an error with what is missing.
""",
        "TRAINER FILE|COMMAND...",
        flags=(
            Flag("--write", "a script, or an option of your own configs: DIR/experiment/NAME.yaml", "FILE"),
            Flag("--json", "print overrides, keys without effect and notes as one JSON object"),
        ),
        takes_any_words=True,
    ),
    Command(
        "diff",
        "compare two runs: config, step, memory, collectives, layouts",
        "diff:diff_command",
        """\
Shows what changed from one run to another: config, predicted step, memory,
collectives, layouts. Each is a run directory with spec.yaml and plan.json; if
both have report.json, which meshloom compile writes, the compiled programs are
compared too. A directory that meshloom inspect wrote has report.json alone.
""",
        "RUN_A RUN_B",
        flags=(JSON,),
    ),
    Command(
        "guard",
        "judge a step by that of the base branch, for pull requests",
        "guard:guard_command",
        """\
Judges a step by an earlier one, as a pull request by its base branch. The step
is PROGRAM, as in `meshloom inspect`, or a directory that Meshloom wrote.
Without it, the words are a declaration, which is compiled as by `meshloom
compile`. BASE is one of

  RUN    a directory of `meshloom compile` or `meshloom inspect`
  FILE   its report.json, or the text of a compiled program with target=NAME
  FILE   what `meshloom explain --json` prints: then only estimates are
         compared, in seconds and without a compiler

Names what is worse: the step, a kind of compute, exposed time, memory, traffic,
new collectives and those that are no longer asynchronous, new findings. P is a
number of percent, "2%". The exit code is 0, 10 if the step is worse than
tolerated, and 2 for a mistake, such as a base of another model or target.
""",
        "[PROGRAM] [group=option ...]",
        flags=(
            Flag("--base", "the step to compare with", "BASE", is_required=True),
            Flag("--max-slower", "tolerated growth of the step; without it, 2%", "P"),
            Flag("--max-slower-part", "of the time of one kind of compute, as attention; without it, 10%", "P"),
            Flag("--max-exposed", "of exposed time, in percent of the base's step; without it, 1%", "P"),
            Flag("--max-memory", "of the memory; without it, 1%", "P"),
            Flag("--max-traffic", "of the bytes that collectives send; without it, 1%", "P"),
            Flag("--allow", "accept these: lost-async, new-collective, does-not-fit, a rule of the lint", "RULE,..."),
            Flag("--across", "compare even with the base of another model, batch or target"),
            Flag("--estimate", "compare the estimates of both, without compiling"),
            Flag("--markdown", "write the comment for the pull request to FILE", "FILE"),
            JSON,
            Flag("--module", "the program to read, if a text or a dump has several", "NAME"),
            Flag("--config-dir", "your own configs", "DIR"),
            Flag("--config-name", "your own config instead of the default one", "NAME"),
            Flag("--allow-code-from", "as in `meshloom compile`", "MODULE"),
        ),
    ),
    Command(
        "profile",
        "compare traced steps of a run with their prediction",
        "profile:profile_command",
        """\
Compares the steps that a run traced (meshloom train profile.steps=[10,13]) with
what the schedule of its program predicts: the step, each kind of compute and of
collectives, and the operations that differ most. Writes profile.json and
profile.html into RUN; the page shows both steps on one time axis.
""",
        "RUN",
        flags=(Flag("--hlo", "list each operation, with the name of its HLO instruction"), JSON),
    ),
    Command(
        "calibrate",
        "correct later predictions for a chip by traced runs or profiles",
        "profile:calibrate_command",
        """\
Finds how much longer each kind of compute, and each kind of link, takes on a
chip than predicted, from runs that traced steps on it (meshloom train
profile.steps=[10,13]), or from profiles of any program, as inspect reads them,
with the target=NAME that they ran on. Keeps it in ~/.config/meshloom, where
explain, compile, inspect, tune and guard find it for each target of this chip,
and say so; calibration=none predicts without it. Without RUN, shows what is
kept. With --to, writes a config that counts only where it is named:

    meshloom explain --config-dir DIR calibration=NAME ...
""",
        "[target=NAME] [RUN...]",
        flags=(
            Flag("--to", "write DIR/calibration/NAME.yaml, a config of your project", "DIR"),
            Flag("--name", "the name of that config; without it, the name of the chip", "NAME"),
            Flag("--remove", "remove what is kept for a chip", "CHIP"),
            Flag("--module", "the program of a profile, if several took much of its time", "NAME"),
            JSON,
            Flag("--config-dir", "your own configs: targets, calibrations", "DIR"),
        ),
    ),
    Command(
        "sweep",
        "show a sweep, also while it runs: table, page, CSV, Parquet, JSON",
        "show_sweep:sweep_command",
        """\
Shows the table of a sweep, the best point first, and writes a page with heat
map, parallel coordinates, Pareto front and, for runs, loss curves. DIR is what
`meshloom explain -m`, `compile -m`, `train -m` or `meshloom tune` wrote; the
sweep may still be running.
""",
        "DIR",
        flags=(
            Flag("--sort", "sort by a figure other than the objective: step_seconds, mfu, peak_bytes, ...", "FIGURE"),
            Flag("--all", "show every point; without it, the best 20"),
            Flag("--csv", "write the rows as CSV, with a column for each field", "FILE"),
            Flag("--parquet", "write the rows as Parquet", "FILE"),
            Flag("--json", "print sweep and rows as one JSON object; no table, no page"),
            Flag("--page", "write the page to FILE; without it, to DIR/sweep.html", "FILE"),
            Flag("--open", "open the page in a browser"),
        ),
    ),
    Command(
        "runs",
        "list runs and sweeps on this machine: state, last step, loss",
        "runs:runs_command",
        """\
Lists the runs and sweeps at and below DIR, the newest first: whether they are
running, done, stopped, failed or killed, and why; the last step, the loss, the
directory. If DIR is itself a sweep, its points are listed. Without DIR, those
in outputs/ and multirun/ of the working directory are listed, and others up to
two levels below it, such as hydra.run.dir=my-run or runs/first.
""",
        "[DIR]",
        flags=(Flag("--all", "list every run; without it, the newest 30"), Flag("--json", "print a JSON list")),
    ),
    Command(
        "generate",
        "continue a prompt with the weights of a run or a published model",
        "weights:generate_command",
        opens_weights=True,
        joins_processes=True,
        flags=(Flag("--json", "a JSON line for each prompt, when its text is complete"),),
        section="generate",
        streams=True,
    ),
    Command(
        "export",
        "write the weights of a run as transformers and vLLM read them",
        "weights:export_command",
        opens_weights=True,
        flags=(SAID,),
        section="export",
    ),
    Command(
        "tune",
        "search for the best mesh, sharding and remat, without compiling",
        "sweep:tune_command",
        predicts=True,
        flags=(SAID,),
    ),
    Command(
        "launch",
        "run on every host: SLURM, Kubernetes, Cloud TPU, or a rehearsal",
        "train:launch_command",
        flags=(SAID,),
    ),
    Command(
        "data",
        "tokenise a corpus into shards, once, for data=tokens to read",
        "data:data_command",
        flags=(Flag("--show", "show the first document and what of it is trained on, and write nothing"), SAID),
    ),
    Command(
        "schema",
        "print the JSON schema of a file, or of what --json prints",
        "schema:schema_command",
        """\
Prints the JSON schema of a file (report, plan), or of what a command prints
with --json: NAME is a command, or one of those in docs/json.md. The schema is
made from the types that the file is written from.
""",
        "NAME",
        flags=(Flag("--json", "the same: a schema is JSON"),),
    ),
)
SWEEP = Command("-m", "run a command for each combination of values", "sweep:run_sweep")
COMMANDS = MappingProxyType({command.name: command for command in _ALL})
