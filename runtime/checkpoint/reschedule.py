"""A run that goes on under another schedule than its checkpoint was saved under: what changes, said before it does."""

from typing import Any

from meshloom.compiler.config.spec import RunSpec
from meshloom.compiler.sharding.optimizer_state import build_schedule

SAME_WITHIN = 1e-6  # of a rate: float32 rounds


def schedule_record(spec: RunSpec, num_updates: int) -> dict[str, Any]:
    """Returns what a checkpoint after `num_updates` keeps of the schedule: its keys, and the rate of the next one."""
    return {"keys": _keys(spec), "next_learning_rate": _rate(spec, num_updates)}


def describe_change(saved: dict[str, Any], spec: RunSpec, num_updates: int) -> str | None:
    """Returns a line on what becomes of the learning rate; None where the schedule is that of the checkpoint.

    saved: what `schedule_record` returned for the checkpoint.
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
