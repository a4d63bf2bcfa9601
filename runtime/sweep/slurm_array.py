"""The points of a sweep as arrays of SLURM jobs: `hydra/launcher=meshloom_slurm`.

Each element leaves its exit code in a file. If the process of the sweep dies, arrays go on, and the same command finds
them by the files that it wrote when it submitted them.
"""

import json
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from meshloom.compiler.config.launch_spec import SlurmLaunch

from ..core.files import replace_text
from ..launch.slurm import render_slurm_array
from .points import PRINTED, Point
from .submitted import PlannedPoint, SubmittedPoints, run_tool

ARRAY_FILE = "array-{}.json"


class SlurmArrays(SubmittedPoints):
    """An array for the points of each kind of hosts. scratch: all hosts see it."""

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
    """Returns True if any element of an array waits or runs. squeue fails for a job that it has forgotten."""
    done = subprocess.run(["squeue", "--noheader", f"--jobs={job}"], capture_output=True, text=True, check=False)
    return done.returncode == 0 and bool(done.stdout.strip())
