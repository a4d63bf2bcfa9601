"""Describes how a checkpoint differs from the run that continues from it: in its arrays, or in its schedule."""

from collections.abc import Mapping
from typing import Any

from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.sharding.state import build_schedule

MOST_SHOWN = 6


def tree_differences(there: Any, here: Any) -> list[str]:
    """Returns a line for each array that differs, parameters first, since the optimizer's state follows them.

    there, here: trees whose leaves have a shape and a dtype.
    """
    a, b = _described(there), _described(here)
    paths = [path for path in a.keys() | b.keys() if a.get(path) != b.get(path)]
    return [_difference(path, a, b) for path in sorted(paths, key=parameters_first)]


def parameters_first(path: str) -> tuple[bool, str]:
    """Returns the key that sorts paths of a state for display."""
    return not path.startswith("params/"), path


def first_lines(lines: list[str]) -> list[str]:
    """Returns the first lines, and the number of those that are left out."""
    more = [f"and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else []
    return lines[:MOST_SHOWN] + more


def listed(differences: list[str]) -> str:
    """Returns the first differences as indented lines, and the number of those that are left out."""
    return "".join(f"\n    {line}" for line in first_lines(differences))


def described(array: Any) -> str:
    """Returns the type and shape of an array: float32[264,32]."""
    return f"{array.dtype}{list(array.shape)}".replace(" ", "")


def _difference(path: str, there: Mapping[str, str], here: Mapping[str, str]) -> str:
    if path not in here:
        return f"{path} {there[path]} is there, not here"
    if path not in there:
        return f"{path} {here[path]} is not there, but here"
    return f"{path} is {there[path]} there, {here[path]} here"


def _described(tree: Any) -> dict[str, str]:
    return {path: described(x) for path, x in leaves_by_path(tree).items()}


SAME_WITHIN = 1e-6  # relative difference of equal rates: float32 rounds


def schedule_record(spec: RunSpec, num_updates: int) -> dict[str, Any]:
    """Returns the schedule's record for a checkpoint after `num_updates`: its keys, and the rate of the next update."""
    return {"keys": _keys(spec), "next_learning_rate": _rate(spec, num_updates)}


def describe_change(saved: dict[str, Any], spec: RunSpec, num_updates: int) -> str | None:
    """Returns a line about the change of the learning rate; None if the schedule is that of the checkpoint.

    saved: the checkpoint's `schedule_record`.
    """
    before, now = saved["keys"], _keys(spec)
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if not changed:
        return None
    keys = ", ".join(f"{key} {before.get(key, '(none)')} -> {now.get(key, '(none)')}" for key in changed)
    old, new = saved["next_learning_rate"], _rate(spec, num_updates)
    if abs(new - old) <= SAME_WITHIN * max(abs(old), abs(new)):
        return f"another schedule than the checkpoint's ({keys}); the learning rate of the next step stays {new:.4g}"
    return f"warning: the learning rate of the next step is {new:.4g}, not {old:.4g}: another schedule than the checkpoint's ({keys})"  # noqa: E501


def _keys(spec: RunSpec) -> dict[str, Any]:
    schedule = {f"schedule.{key}": value for key, value in spec.schedule.model_dump(mode="json").items()}
    return {"num_steps": spec.num_steps, "optimizer.learning_rate": spec.optimizer.learning_rate, **schedule}


def _rate(spec: RunSpec, num_updates: int) -> float:
    return float(build_schedule(spec)(num_updates))  # type: ignore[arg-type]
