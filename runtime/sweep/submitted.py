"""Runs the points of a sweep as jobs of a cluster, which start their processes on other hosts.

This process submits the jobs, waits until each has ended, and makes rows of what they left in their directories. Ctrl-C
cancels the jobs that have not ended. If this process dies, the jobs go on, and the same command finds them again.
"""

import json
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any
from meshloom.compiler.core.user_code import code_allowed_from
from meshloom.compiler.core.visible import write_error
from meshloom.compiler.declare.choices import model_of
from meshloom.compiler.declare.compose import read_spec
from meshloom.compiler.declare.launch_spec import JobSetLaunch, LaunchSpec, SlurmLaunch
from meshloom.compiler.declare.overrides import override

from ..core.failures import FINAL, raise_if_interrupted
from ..core.files import replace_text
from ..launch.engines import render_jobset, render_slurm_array
from ..launch.plan import LaunchPlan, plan_launch
from .outcomes import outcome_of_error, outcome_of_run
from .rows import PRINTED, Outcome, Point, SweepCommand, Task

_POLL_SECONDS = 2.0
POLLS_UNTIL_LOST = 5  # a job is gone, and its files may still be on their way over a network disk
ARRAY_FILE = "array-{}.json"
KUBECTL = "kubectl"
STATE = "--output=jsonpath={.status.terminalState}"
EXIT_CODES = "--output=jsonpath={.items[*].status.containerStatuses[*].state.terminated.exitCode}"


@dataclass(frozen=True)
class ClusterSettings:
    """The settings of a cluster's launcher. engine: as in `launch`. num_at_once: the most points that run at once;
    None: as many as the cluster has room for."""

    engine: str
    num_at_once: int | None


def cluster_settings(launcher: Mapping[str, Any], command: SweepCommand, launch: LaunchSpec) -> ClusterSettings | None:
    """Returns the settings of a cluster's launcher; None if another launcher was chosen. Raises ConfigError if it
    cannot run this sweep."""
    engine = next((name for name, each in ENGINES.items() if launcher.get("_target_") == each.target), None)
    if engine is None:
        return None
    num_at_once = launcher.get("num_at_once")
    problems = list[Problem]()
    if command != "train":
        what = f"meshloom_{engine} runs sweeps of train, and {command} needs no other machine"
        problems.append(Problem("hydra/launcher", what, "leave it out"))
    if launch.engine != engine:
        what = f"hydra/launcher=meshloom_{engine} submits what launch={engine} says, and launch is {launch.engine}"
        problems.append(Problem("launch", what, f"add launch={engine}, with what your cluster needs"))
    if num_at_once is not None and num_at_once < 1:
        what, fix = f"{num_at_once} is not a number of jobs", "give 1 or more, or null: as many as there is room for"
        problems.append(Problem("hydra.launcher.num_at_once", what, fix))
    raise_if_any(problems)
    return ClusterSettings(engine, num_at_once)


@dataclass
class SubmittedPoints(ABC):
    """Runs points as the pool does. scratch: a folder for scripts, and for what jobs leave. task_of, ended, told: as in
    the pool."""

    settings: ClusterSettings
    task_of: Callable[[Point], Task]
    scratch: Path
    ended: Callable[[Point, Outcome], object]
    told: Callable[[int], None]
    jobs: dict[int, str] = field(default_factory=dict, init=False)  # the job of each point, by index

    def __enter__(self) -> Self:
        self.scratch.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:  # noqa: B027 (there is nothing to end)
        """Leaves the files, by which the same command finds jobs that still run."""

    @abstractmethod
    def find(self, points: Mapping[int, Point]) -> dict[int, str]:
        """Returns the jobs that an earlier start has submitted, by index of their points."""

    @abstractmethod
    def submit(self, plans: Mapping[int, tuple[LaunchPlan, LaunchSpec]]) -> dict[int, str]:
        """Submits points. Returns their jobs by index; nothing waits for a point without a job."""

    @abstractmethod
    def alive(self, jobs: Set[str]) -> Set[str]:
        """Returns the jobs that wait or run."""

    @abstractmethod
    def exit_code(self, index: int) -> int | None:
        """Returns the exit code of a point; None if it has not ended."""

    def forget(self, index: int) -> None:  # noqa: B027 (not every cluster has something to forget)
        """Removes the record that a point has ended, once it has a row: the point may be run again."""

    @abstractmethod
    def cancel(self, jobs: Sequence[str]) -> None:
        """Ends jobs."""

    def run(self, points: Iterable[Point]) -> None:
        """Runs all points. Ctrl-C cancels the jobs that have not ended, and is raised again."""
        left = {point.index: point for point in points}
        self.jobs = self.find(left)
        missed = dict.fromkeys(left, 0)
        try:
            new = {index: plan for index in left if index not in self.jobs and (plan := self._plan(left[index]))}
            self.jobs |= self.submit(new) if new else {}
            left = {index: point for index, point in left.items() if index in self.jobs}
            while left:
                self.told(len(left))
                raise_if_interrupted()
                alive = self.alive({self.jobs[index] for index in left})
                for index in list(left):
                    exit_code = self.exit_code(index)
                    missed[index] = 0 if self.jobs[index] in alive else missed[index] + 1
                    if exit_code is not None or missed[index] >= POLLS_UNTIL_LOST:
                        self._end(left.pop(index), exit_code)
                        self.forget(index)
                time.sleep(_POLL_SECONDS if left else 0)
        except BaseException:
            if jobs := {self.jobs[index] for index in left if index in self.jobs}:
                self.cancel(sorted(jobs))
            raise

    def _plan(self, point: Point) -> tuple[LaunchPlan, LaunchSpec] | None:
        """Returns the plan of a point's job. A point that cannot run ends at once, and has none."""
        task = self.task_of(point)
        here = override("hydra.run.dir", str(task.directory))
        request = replace(task.request, overrides=(*task.request.overrides, here))
        try:
            with code_allowed_from(task.allowed):
                spec = read_spec(request, then=lambda spec: spec)
            label = spec.run.name or spec.model.family
            return plan_launch(spec, request, label=label, allowed=task.allowed), spec.launch
        except ConfigError as error:
            self.ended(point, outcome_of_error(error))
            return None

    def _end(self, point: Point, exit_code: int | None) -> None:
        if exit_code is None:
            why = f"job {self.jobs[point.index]} is gone, and left no exit code: it was cancelled, or lost"
            self.ended(point, Outcome(status="aborted", exit_code=1, why=why))
            return
        task = self.task_of(point)
        printed = task.directory / PRINTED
        said = printed.read_text(errors="replace") if printed.exists() else ""
        with code_allowed_from(task.allowed):
            model = model_of(task.request) if exit_code == 0 else None
        self.ended(point, outcome_of_run(task.directory, exit_code, said, model))


def run_tool(*words: str) -> str:
    """Returns what a tool of the cluster prints. Raises ConfigError if the tool is not installed, or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        what = f"{words[0]} is not installed here"
        raise ConfigError([Problem("hydra/launcher", what, "type this where the cluster's tools are")]) from None
    if done.returncode:
        what = f"{words[0]} failed: {done.stderr.strip()}"
        raise ConfigError([Problem("hydra/launcher", what, "correct the keys of launch that it names")])
    return done.stdout.strip()


class SlurmArrays(SubmittedPoints):
    """Submits an array of SLURM for the points of each kind of hosts: `hydra/launcher=meshloom_slurm`.

    Each element leaves its exit code in a file of `scratch`, which all hosts see.
    """

    target = "hydra_plugins.meshloom_sweeps.launcher.SlurmLauncher"

    def find(self, points: Mapping[int, Point]) -> dict[int, str]:
        found = {}
        for path in self.scratch.glob(ARRAY_FILE.format("*")):
            told = json.loads(path.read_text())
            alive = bool(self.alive({told["job"]}))
            for index in map(int, told["points"]):
                if index in points and (alive or self._exit_file(index).exists()):
                    found[index] = told["job"]
        return found

    def submit(self, plans: Mapping[int, tuple[LaunchPlan, LaunchSpec]]) -> dict[int, str]:
        groups: dict[object, list[int]] = defaultdict(list)
        for index, (plan, launch) in plans.items():
            groups[plan.hosts, launch.model_dump_json()].append(index)
        jobs = {}
        for number, indices in enumerate(groups.values()):
            elements, launch = [], plans[indices[0]][1]
            assert isinstance(launch, SlurmLaunch)
            for index in indices:
                directory, exit_file = Path(plans[index][0].run_dir), self._exit_file(index)
                directory.mkdir(parents=True, exist_ok=True)
                exit_file.unlink(missing_ok=True)
                elements.append((plans[index][0], str(directory / PRINTED), str(exit_file)))
            log = str(self.scratch / "slurm-%A_%a.log")
            script = self.scratch / f"array-{number}.sbatch"
            script.write_text(render_slurm_array(elements, launch, num_at_once=self.settings.num_at_once, log=log))
            job = run_tool("sbatch", "--parsable", str(script)).partition(";")[0]
            replace_text(self.scratch / ARRAY_FILE.format(job), json.dumps({"job": job, "points": indices}))
            jobs |= dict.fromkeys(indices, job)
        return jobs

    def alive(self, jobs: Set[str]) -> Set[str]:
        """Returns the arrays of which any element waits or runs. `squeue` fails for a job that it has forgotten."""
        words = {job: ["squeue", "--noheader", f"--jobs={job}"] for job in jobs}
        done = {job: subprocess.run(words[job], capture_output=True, text=True, check=False) for job in jobs}
        return {job for job, each in done.items() if each.returncode == 0 and each.stdout.strip()}

    def exit_code(self, index: int) -> int | None:
        try:
            return int(self._exit_file(index).read_text())
        except FileNotFoundError:
            return None

    def forget(self, index: int) -> None:
        self._exit_file(index).unlink(missing_ok=True)

    def cancel(self, jobs: Sequence[str]) -> None:
        subprocess.run(["scancel", *jobs], check=False)

    def _exit_file(self, index: int) -> Path:
        return self.scratch / f"{index}.exit"


@dataclass
class JobSets(SubmittedPoints):
    """Applies a JobSet of Kubernetes for each point: `hydra/launcher=meshloom_jobset`. scratch: takes the manifests.

    A JobSet is named by the declaration and directory of its point, so that applying it again changes nothing: this is
    how the same command finds those that run or have ended.
    """

    target = "hydra_plugins.meshloom_sweeps.launcher.JobSetLauncher"
    _namespaces: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False)

    def find(self, points: Mapping[int, Point]) -> dict[int, str]:  # noqa: ARG002 (applying again finds them)
        return {}

    def submit(self, plans: Mapping[int, tuple[LaunchPlan, LaunchSpec]]) -> dict[int, str]:
        jobs = {}
        for index, (plan, launch) in plans.items():
            assert isinstance(launch, JobSetLaunch)
            manifest = self.scratch / f"{plan.name}.yaml"
            manifest.write_text(render_jobset(plan, launch))
            if launch.dry_run or (launch.dry_run is None and shutil.which(KUBECTL) is None):
                why = "launch.dry_run=true" if launch.dry_run else f"{KUBECTL} is not installed here"
                write_error(f"not applied, as {why}: {manifest}")
                continue
            self._namespaces[plan.name] = (f"--namespace={launch.namespace}",) if launch.namespace else ()
            run_tool(KUBECTL, "apply", f"--filename={manifest}")
            jobs[index] = plan.name
        return jobs

    def alive(self, jobs: Set[str]) -> Set[str]:
        listed = {
            name.removeprefix("jobset.jobset.x-k8s.io/")
            for namespace in {self._namespaces[job] for job in jobs}
            for name in run_tool(KUBECTL, "get", "jobsets", "--output=name", *namespace).split()
        }
        return jobs & listed

    def exit_code(self, index: int) -> int | None:
        """Returns the exit code of the pod that decided. Pods of earlier restarts are gone."""
        name = self.jobs[index]
        namespace = self._namespaces[name]
        state = run_tool(KUBECTL, "get", "jobset", name, "--ignore-not-found", STATE, *namespace)
        if state != "Failed":
            return 0 if state == "Completed" else None
        selector = f"--selector=jobset.sigs.k8s.io/jobset-name={name}"
        printed = run_tool(KUBECTL, "get", "pods", selector, EXIT_CODES, *namespace)
        failed = [code for code in map(int, printed.split()) if code]
        return next((code for code in failed if code in FINAL), failed[0] if failed else 1)

    def cancel(self, jobs: Sequence[str]) -> None:
        for job in jobs:
            run_tool(KUBECTL, "delete", "jobset", job, "--ignore-not-found", *self._namespaces[job])


ENGINES = {"slurm": SlurmArrays, "jobset": JobSets}  # by the engine of `launch`
