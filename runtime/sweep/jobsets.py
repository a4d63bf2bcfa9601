"""The points of a sweep as JobSets of Kubernetes: `hydra/launcher=meshloom_jobset`.

A JobSet has the name of its point's declaration and directory, so that applying it again changes nothing: the same
command finds those that run or have ended.
"""

import shutil
from collections.abc import Mapping, Sequence, Set

from meshloom.compiler.config.launch_spec import JobSetLaunch
from meshloom.compiler.core.visible import write_error

from ..core.failures import FINAL
from ..launch.jobset import render_jobset
from .points import Point
from .submitted import PlannedPoint, SubmittedPoints, run_tool

KUBECTL = "kubectl"
STATE = "--output=jsonpath={.status.terminalState}"
EXIT_CODES = "--output=jsonpath={.items[*].status.containerStatuses[*].state.terminated.exitCode}"


class JobSets(SubmittedPoints):
    """A JobSet for each point. scratch: takes the manifests."""

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
        """Returns the exit code that decided, of all pods; those of earlier restarts are gone."""
        selector = f"--selector=jobset.sigs.k8s.io/jobset-name={name}"
        told = run_tool(KUBECTL, "get", "pods", selector, EXIT_CODES, *self._namespaces[name])
        codes = [code for code in map(int, told.split()) if code]
        return next((code for code in codes if code in FINAL), codes[0] if codes else 1)

    def cancel(self, jobs: Sequence[str]) -> None:
        for job in jobs:
            run_tool(KUBECTL, "delete", "jobset", job, "--ignore-not-found", *self._namespaces[job])
