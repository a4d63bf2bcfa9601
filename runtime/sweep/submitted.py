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
from typing import Self

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.user_imports import code_allowed_from
from meshloom.compiler.core.visible import write_error
from meshloom.compiler.declare.choices import model_of
from meshloom.compiler.declare.compose import read_spec
from meshloom.compiler.declare.launch_spec import JobSetLaunch, SlurmLaunch
from meshloom.compiler.declare.overrides import override
from meshloom.compiler.declare.run_spec import RunSpec

from ..core.failures import FINAL
from ..core.files import replace_text
from ..launch.clusters import render_jobset, render_slurm_array
from ..launch.plan import LaunchPlan, plan_launch
from .outcomes import outcome_of_error, outcome_of_run
from .rows import PRINTED, Outcome, Point, Task
from .settings import ClusterSettings

_POLL_SECONDS = 2.0
POLLS_UNTIL_LOST = 5  # a job is gone, and its files may still be on their way over a network disk
ARRAY_FILE = "array-{}.json"
KUBECTL = "kubectl"
STATE = "--output=jsonpath={.status.terminalState}"
EXIT_CODES = "--output=jsonpath={.items[*].status.containerStatuses[*].state.terminated.exitCode}"


@dataclass(frozen=True)
class PlannedPoint:
    """A point, with its declaration and the plan of its job."""

    point: Point
    spec: RunSpec
    plan: LaunchPlan


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
    _missed: dict[int, int] = field(default_factory=dict, init=False)

    def __enter__(self) -> Self:
        self.scratch.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the files, by which the same command finds jobs that still run."""
        self.jobs.clear()

    @abstractmethod
    def find(self, points: Mapping[int, Point]) -> dict[int, str]:
        """Returns the jobs that an earlier start has submitted, by index of their points."""

    @abstractmethod
    def submit(self, points: Sequence[PlannedPoint]) -> dict[int, str]:
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
        try:
            new = [point for index, point in left.items() if index not in self.jobs]
            planned = [one for one in map(self._plan, new) if one]
            self.jobs |= self.submit(planned) if planned else {}
            left = {index: point for index, point in left.items() if index in self.jobs}
            while left:
                self.told(len(left))
                alive = self.alive({self.jobs[index] for index in left})
                for index in [index for index in left if self._has_ended(index, alive)]:
                    self._end(left.pop(index))
                    self.forget(index)
                time.sleep(_POLL_SECONDS if left else 0)
        except BaseException:
            if jobs := {self.jobs[index] for index in left if index in self.jobs}:
                self.cancel(sorted(jobs))
            raise

    def _plan(self, point: Point) -> PlannedPoint | None:
        """Returns the plan of a point. A point that cannot run ends at once, and has none."""
        task = self.task_of(point)
        here = override("hydra.run.dir", str(task.directory))
        request = replace(task.request, overrides=(*task.request.overrides, here))
        try:
            with code_allowed_from(task.allowed):
                spec = read_spec(request, then=lambda spec: spec)
            plan = plan_launch(spec, request, label=spec.run.name or spec.model.family, allowed=task.allowed)
        except ConfigError as error:
            self.ended(point, outcome_of_error(error))
            return None
        return PlannedPoint(point, spec, plan)

    def _has_ended(self, index: int, alive: Set[str]) -> bool:
        if self.exit_code(index) is not None:
            return True
        self._missed[index] = 0 if self.jobs[index] in alive else self._missed.get(index, 0) + 1
        return self._missed[index] >= POLLS_UNTIL_LOST

    def _end(self, point: Point) -> None:
        task, exit_code = self.task_of(point), self.exit_code(point.index)
        if exit_code is None:
            why = f"job {self.jobs[point.index]} is gone, and left no exit code: it was cancelled, or lost"
            self.ended(point, Outcome(status="aborted", exit_code=1, why=why))
            return
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

    def find(self, points: Mapping[int, Point]) -> dict[int, str]:
        found = {}
        for path in self.scratch.glob(ARRAY_FILE.format("*")):
            told = json.loads(path.read_text())
            alive = bool(self.alive({told["job"]}))
            for index in map(int, told["points"]):
                if index in points and (alive or self._exit_file(index).exists()):
                    found[index] = told["job"]
        return found

    def submit(self, points: Sequence[PlannedPoint]) -> dict[int, str]:
        groups: dict[object, list[PlannedPoint]] = defaultdict(list)
        for one in points:
            groups[one.plan.hosts, one.spec.launch.model_dump_json()].append(one)
        return {index: job for n, group in enumerate(groups.values()) for index, job in self._submit(n, group).items()}

    def _submit(self, number: int, group: Sequence[PlannedPoint]) -> dict[int, str]:
        elements, launch = [], group[0].spec.launch
        assert isinstance(launch, SlurmLaunch)
        for one in group:
            directory, exit_file = Path(one.plan.run_dir), self._exit_file(one.point.index)
            directory.mkdir(parents=True, exist_ok=True)
            exit_file.unlink(missing_ok=True)
            elements.append((one.plan, str(directory / PRINTED), str(exit_file)))
        log = str(self.scratch / "slurm-%A_%a.log")
        script = self.scratch / f"array-{number}.sbatch"
        script.write_text(render_slurm_array(elements, launch, num_at_once=self.settings.num_at_once, log=log))
        job = run_tool("sbatch", "--parsable", str(script)).partition(";")[0]
        indices = [one.point.index for one in group]
        replace_text(self.scratch / ARRAY_FILE.format(job), json.dumps({"job": job, "points": indices}))
        return dict.fromkeys(indices, job)

    def alive(self, jobs: Set[str]) -> Set[str]:
        return {job for job in jobs if _is_queued(job)}

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


def _is_queued(job: str) -> bool:
    """Returns True if any element of an array waits or runs. `squeue` fails for a job that it has forgotten."""
    done = subprocess.run(["squeue", "--noheader", f"--jobs={job}"], capture_output=True, text=True, check=False)
    return done.returncode == 0 and bool(done.stdout.strip())


class JobSets(SubmittedPoints):
    """Applies a JobSet of Kubernetes for each point: `hydra/launcher=meshloom_jobset`. scratch: takes the manifests.

    A JobSet is named by the declaration and directory of its point, so that applying it again changes nothing: this is
    how the same command finds those that run or have ended.
    """

    _namespaces: dict[str, tuple[str, ...]]

    def find(self, points: Mapping[int, Point]) -> dict[int, str]:  # noqa: ARG002 (applying again finds them)
        self._namespaces = {}
        return {}

    def submit(self, points: Sequence[PlannedPoint]) -> dict[int, str]:
        jobs = {}
        for one in points:
            launch = one.spec.launch
            assert isinstance(launch, JobSetLaunch)
            manifest = self.scratch / f"{one.plan.name}.yaml"
            manifest.write_text(render_jobset(one.plan, launch))
            if launch.dry_run or (launch.dry_run is None and shutil.which(KUBECTL) is None):
                why = "launch.dry_run=true" if launch.dry_run else f"{KUBECTL} is not installed here"
                write_error(f"not applied, as {why}: {manifest}")
                continue
            self._namespaces[one.plan.name] = (f"--namespace={launch.namespace}",) if launch.namespace else ()
            run_tool(KUBECTL, "apply", f"--filename={manifest}")
            jobs[one.point.index] = one.plan.name
        return jobs

    def alive(self, jobs: Set[str]) -> Set[str]:
        listed = {
            name.removeprefix("jobset.jobset.x-k8s.io/")
            for namespace in {self._namespaces[job] for job in jobs}
            for name in run_tool(KUBECTL, "get", "jobsets", "--output=name", *namespace).split()
        }
        return jobs & listed

    def exit_code(self, index: int) -> int | None:
        name = self.jobs[index]
        words = (KUBECTL, "get", "jobset", name, "--ignore-not-found", STATE, *self._namespaces[name])
        state = run_tool(*words)
        return 0 if state == "Completed" else self._failed_with(name) if state == "Failed" else None

    def _failed_with(self, name: str) -> int:
        """Returns the exit code of the pod that decided. Pods of earlier restarts are gone."""
        selector = f"--selector=jobset.sigs.k8s.io/jobset-name={name}"
        told = run_tool(KUBECTL, "get", "pods", selector, EXIT_CODES, *self._namespaces[name])
        codes = [code for code in map(int, told.split()) if code]
        return next((code for code in codes if code in FINAL), codes[0] if codes else 1)

    def cancel(self, jobs: Sequence[str]) -> None:
        for job in jobs:
            run_tool(KUBECTL, "delete", "jobset", job, "--ignore-not-found", *self._namespaces[job])
