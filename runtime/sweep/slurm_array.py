"""The points of a sweep as arrays of SLURM jobs: `hydra/launcher=meshloom_slurm`.

Each element runs `meshloom train` on the hosts of its target and leaves its exit code in a file. This process waits for
those files and makes rows of them. Ctrl-C cancels the arrays; if this process dies they go on, and the same command
finds them.
"""

import json
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from meshloom.compiler.config.allowed_code import code_allowed_from
from meshloom.compiler.config.compose import read_spec
from meshloom.compiler.config.launch_spec import SlurmLaunch
from meshloom.compiler.config.model_choice import model_of
from meshloom.compiler.config.override_text import override
from meshloom.compiler.core.errors import ConfigError, Problem

from ..core.files import replace_text
from ..launch.plan import LaunchPlan, plan_launch
from ..launch.slurm import render_slurm_array
from .outcomes import outcome_of_error, outcome_of_run
from .own_process import PRINTED
from .points import Outcome, Point, Task

POLL_SECONDS = 2.0
POLLS_UNTIL_LOST = 5  # a job has left the queue, and its exit code may still be on its way over a network disk
ARRAY_FILE = "array-{}.json"


@dataclass(frozen=True)
class ArraySettings:
    """Of the launcher. num_at_once: the most points that run at once; None: as many as SLURM has room for."""

    num_at_once: int | None


@dataclass
class SlurmArrays:
    """Runs points as the pool does. scratch: a folder that all hosts see, for scripts and exit codes. task_of, ended,
    told: as of the pool."""

    settings: ArraySettings
    task_of: Callable[[Point], Task]
    scratch: Path
    ended: Callable[[Point, Outcome], object]
    told: Callable[[int], None]
    _jobs: dict[int, str] = field(default_factory=dict, init=False)  # of points, by index
    _missed: dict[int, int] = field(default_factory=lambda: defaultdict(int), init=False)

    def __enter__(self) -> Self:
        self.scratch.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the files: they are how the same command finds arrays that still run."""

    def run(self, points: Iterable[Point]) -> None:
        """Runs all points. Ctrl-C cancels those that have not ended, and is raised again."""
        left = {point.index: point for point in points}
        self._jobs = self._found(left)
        try:
            self._submit([point for index, point in left.items() if index not in self._jobs])
            for index in left.keys() - self._jobs.keys():  # it was refused
                del left[index]
            while left:
                self.told(len(left))
                queued = self._queued()
                for index in [index for index in left if self._has_ended(index, queued)]:
                    self._end(left.pop(index))
                time.sleep(POLL_SECONDS if left else 0)
        except BaseException:
            jobs = {self._jobs[index] for index in left if index in self._jobs}
            if jobs:
                subprocess.run(["scancel", *sorted(jobs)], check=False)
            for index in left:
                self._exit_file(index).unlink(missing_ok=True)
            raise

    def _found(self, points: dict[int, Point]) -> dict[int, str]:
        """Returns the jobs of points that an earlier start has submitted, which still run or have left an exit code."""
        found = {}
        for path in self.scratch.glob(ARRAY_FILE.format("*")):
            told = json.loads(path.read_text())
            alive = _in_queue([told["job"]])
            for index in map(int, told["points"]):
                if index in points and (alive or self._exit_file(index).exists()):
                    found[index] = told["job"]
        return found

    def _submit(self, points: Sequence[Point]) -> None:
        """Submits an array for the points of each kind of hosts. A point that cannot be planned ends at once."""
        groups: dict[object, list[tuple[Point, LaunchPlan, SlurmLaunch]]] = defaultdict(list)
        for point in points:
            task = self.task_of(point)
            try:
                plan, launch = _planned(task)
            except ConfigError as error:
                self.ended(point, outcome_of_error(error))
                continue
            groups[plan.hosts, launch.model_dump_json()].append((point, plan, launch))
        for number, group in enumerate(groups.values()):
            self._submit_array(number, group)

    def _submit_array(self, number: int, group: list[tuple[Point, LaunchPlan, SlurmLaunch]]) -> None:
        elements = []
        for point, plan, _ in group:
            directory = Path(plan.run_dir)
            directory.mkdir(parents=True, exist_ok=True)
            self._exit_file(point.index).unlink(missing_ok=True)
            elements.append((plan, str(directory / PRINTED), str(self._exit_file(point.index))))
        launch = group[0][2]
        log = str(self.scratch / "slurm-%A_%a.log")
        script = self.scratch / f"array-{number}.sbatch"
        script.write_text(render_slurm_array(elements, launch, num_at_once=self.settings.num_at_once, log=log))
        job = _run("sbatch", "--parsable", str(script)).partition(";")[0]
        indices = [point.index for point, _, _ in group]
        replace_text(self.scratch / ARRAY_FILE.format(job), json.dumps({"job": job, "points": indices}))
        self._jobs |= dict.fromkeys(indices, job)

    def _queued(self) -> set[str]:
        return {job for job in set(self._jobs.values()) if _in_queue([job])}

    def _has_ended(self, index: int, queued: set[str]) -> bool:
        if self._exit_file(index).exists():
            return True
        self._missed[index] = 0 if self._jobs[index] in queued else self._missed[index] + 1
        return self._missed[index] >= POLLS_UNTIL_LOST

    def _end(self, point: Point) -> None:
        task = self.task_of(point)
        try:
            exit_code = int(self._exit_file(point.index).read_text())
        except FileNotFoundError:
            why = f"job {self._jobs[point.index]} left SLURM's queue without an exit code: it was cancelled, or lost"
            self.ended(point, Outcome(status="aborted", exit_code=1, why=why))
            return
        printed = task.directory / PRINTED
        said = printed.read_text(errors="replace") if printed.exists() else ""
        with code_allowed_from(task.allowed):
            model = model_of(task.request) if exit_code == 0 else None
        self.ended(point, outcome_of_run(task.directory, exit_code, said, model))

    def _exit_file(self, index: int) -> Path:
        return self.scratch / f"{index}.exit"


def _planned(task: Task) -> tuple[LaunchPlan, SlurmLaunch]:
    here = override("hydra.run.dir", str(task.directory))
    request = replace(task.request, overrides=(*task.request.overrides, here))
    with code_allowed_from(task.allowed):
        spec = read_spec(request, then=lambda spec: spec)
    assert isinstance(spec.launch, SlurmLaunch)
    return plan_launch(spec, request, label="point", allowed=task.allowed), spec.launch


def _in_queue(jobs: Sequence[str]) -> bool:
    """Returns True if any element of these arrays waits or runs. squeue fails for jobs that it has forgotten."""
    done = subprocess.run(
        ["squeue", "--noheader", f"--jobs={','.join(jobs)}"], capture_output=True, text=True, check=False
    )
    return done.returncode == 0 and bool(done.stdout.strip())


def _run(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        what = f"{words[0]} is not installed here"
        raise ConfigError([Problem("hydra/launcher", what, "type this on a host of the cluster")]) from None
    if done.returncode:
        what = f"{words[0]} failed: {done.stderr.strip()}"
        raise ConfigError([Problem("hydra/launcher", what, "correct the keys of launch that it names")])
    return done.stdout.strip()
