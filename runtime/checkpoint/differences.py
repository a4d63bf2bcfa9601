"""Describes how a checkpoint differs from the run that continues from it: in its arrays, or in its schedule."""

from typing import Any

from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.sharding.state import build_schedule

MOST_SHOWN = 6


def tree_differences(there: Any, here: Any) -> list[str]:
    """Returns a line for each array that differs, parameters first, since the optimizer's state follows them.

    there, here: trees whose leaves have a shape and a dtype.
    """
    a, b = ({path: described(x) for path, x in leaves_by_path(tree).items()} for tree in (there, here))
    lines = []
    for path in sorted((path for path in a.keys() | b.keys() if a.get(path) != b.get(path)), key=parameters_first):
        if path in a and path in b:
            lines.append(f"{path} is {a[path]} there, {b[path]} here")
        else:
            is_there = f"{a[path]} is there, not here" if path in a else f"{b[path]} is not there, but here"
            lines.append(f"{path} {is_there}")
    return lines


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


SAME_WITHIN = 1e-6  # relative difference of equal rates: float32 rounds


def schedule_record(spec: RunSpec, num_updates: int) -> dict[str, Any]:
    """Returns the schedule's record for a checkpoint after `num_updates`: its keys, and the rate of the next update."""
    keys = {f"schedule.{key}": value for key, value in spec.schedule.model_dump(mode="json").items()}
    keys = {"num_steps": spec.num_steps, "optimizer.learning_rate": spec.optimizer.learning_rate, **keys}
    rate: Any = build_schedule(spec)(num_updates)
    return {"keys": keys, "next_learning_rate": float(rate)}


def describe_change(saved: dict[str, Any], here: dict[str, Any]) -> str | None:
    """Returns a line about the change of the learning rate; None if the schedule is that of the checkpoint.

    saved, here: the `schedule_record` of the checkpoint, and of this run.
    """
    before, now = saved["keys"], here["keys"]
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if not changed:
        return None
    keys = ", ".join(f"{key} {before.get(key, '(none)')} -> {now.get(key, '(none)')}" for key in changed)
    old, new = saved["next_learning_rate"], here["next_learning_rate"]
    if abs(new - old) <= SAME_WITHIN * max(abs(old), abs(new)):
        return f"another schedule than the checkpoint's ({keys}); the learning rate of the next step stays {new:.4g}"
    return f"warning: the learning rate of the next step is {new:.4g}, not {old:.4g}: another schedule than the checkpoint's ({keys})"  # noqa: E501
