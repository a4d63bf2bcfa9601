"""Renders the commands and files of the declared engine, and shows or runs them.

`local` and `slurm` have started runs; the others were checked without a cluster (docs/launch.md, "What was tried").
They stay as they are, and no engine is added, until they have started one.
"""

import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from meshloom.compiler.core.visible import write_error, write_out
from meshloom.compiler.declare.launch_spec import (
    JobSetLaunch,
    LaunchSpec,
    LocalLaunch,
    SkyPilotLaunch,
    SlurmLaunch,
    TpuVmLaunch,
    XpkLaunch,
)
from meshloom.compiler.declare.run_spec import RunSpec

from .clouds import render_skypilot, render_tpu_vm, xpk_command
from .clusters import is_schema_there, render_jobset, render_slurm
from .local import PORT, as_shell, local_processes, run_local
from .plan import LaunchPlan


@dataclass(frozen=True)
class Rendering:
    """The commands and the file that an engine gets. tool: the program that runs the commands. commands: run in order,
    in a directory with the file. file: the name of the file. text: its contents. folders: made first, for the engine's
    own files. notes: printed as well."""

    tool: str
    commands: tuple[tuple[str, ...], ...]
    file: str | None = None
    text: str = ""
    folders: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def render(launch: LaunchSpec, plan: LaunchPlan) -> Rendering:
    """Returns the commands and the file for the declared engine. Raises ConfigError if something is missing."""
    name = plan.name
    match launch:
        case SlurmLaunch():
            text = render_slurm(plan, launch)
            return _of_file("sbatch", f"{name}.sbatch", text, folders=(f"{plan.run_dir}/logs",))
        case JobSetLaunch():
            notes = (
                () if is_schema_there() else ("not checked against JobSet's schema: pip install 'meshloom[jobset]'",)
            )
            return _of_file("kubectl apply --filename", f"{name}.yaml", render_jobset(plan, launch), notes=notes)
        case TpuVmLaunch():
            return replace(_of_file("bash", f"{name}.sh", render_tpu_vm(plan, launch)), tool="gcloud")
        case XpkLaunch():
            return Rendering("xpk", (xpk_command(plan, launch),))
        case SkyPilotLaunch():
            return _of_file(f"sky jobs launch --yes --name {name}", f"{name}.yaml", render_skypilot(plan, launch))
        case LocalLaunch():
            raise TypeError(launch)


def _of_file(command: str, file: str, text: str, **more: tuple[str, ...]) -> Rendering:
    """Returns the rendering of a command that takes one file as its last word."""
    words = (*command.split(), file)
    return Rendering(words[0], (words,), file, text, **more)


def run_launch(spec: RunSpec, plan: LaunchPlan) -> int:
    """Starts the run, or shows the commands that would. Returns the exit code."""
    launch = spec.launch
    if isinstance(launch, LocalLaunch):
        if launch.dry_run:
            for process in local_processes(plan, PORT):
                write_out(str(process))
            return _say_dry(plan, "launch.dry_run=true")
        write_error(f"launch: {plan.name}: {plan.hosts}, in {plan.run_dir}")
        return run_local(plan, launch, spec.distributed)
    rendering = render(launch, plan)
    for note in rendering.notes:
        write_error(f"launch: {note}")
    is_missing = shutil.which(rendering.tool) is None
    is_dry = launch.dry_run if launch.dry_run is not None else is_missing
    if is_dry:
        _show(rendering)
        why = "launch.dry_run=true" if launch.dry_run else f"{rendering.tool} is not installed here"
        return _say_dry(plan, why)
    write_error(f"launch: {plan.name}: {plan.hosts}, in {plan.run_dir}")
    return _submit(rendering)


def _show(rendering: Rendering) -> None:
    """Prints the file unchanged, so that standard output can be saved as that file; the commands follow as comments."""
    if rendering.file:
        write_out(rendering.text.rstrip("\n"))
    if rendering.folders:  # SLURM opens a job's log before the script runs, and ends the job if it cannot
        write_out(f"# {shlex.join(['mkdir', '-p', *rendering.folders])}")
    for command in rendering.commands:
        write_out(f"# {shlex.join(command)}" if rendering.file else shlex.join(command))


def _say_dry(plan: LaunchPlan, why: str) -> int:
    write_error(f"launch: {plan.name}: {plan.hosts}; nothing was started: {why}")
    return 0


def _submit(rendering: Rendering) -> int:
    """Returns the exit code of the first command that fails, else 0."""
    for folder in rendering.folders:
        Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="meshloom-launch-") as folder:
        if rendering.file:
            (Path(folder) / rendering.file).write_text(rendering.text)
        for command in rendering.commands:
            argv = [str(Path(folder) / word) if word == rendering.file else word for word in command]
            try:
                code = as_shell(subprocess.run(argv, check=False).returncode)
            except FileNotFoundError:
                write_error(f"error: launch: {rendering.tool} is not installed here")
                write_error("  fix: install it, or set launch.dry_run=true to see what would run")
                return 2
            if code:
                write_error(f"error: launch: {shlex.join(command)} failed with exit code {code}")
                return code
    return 0
