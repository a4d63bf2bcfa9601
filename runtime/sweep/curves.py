"""The loss curves of a sweep's runs, thinned out for a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.files import parse_json
from .rows import Row

METRICS = "metrics.jsonl"
NUM_SAMPLES = 120_000  # of all curves together: a page of some megabytes
LEAST, MOST = 24, 400  # samples of one curve


@dataclass(frozen=True)
class Curve:
    """The losses of a run, in nats per token; None where it was not finite. held_out: (step, loss) of evaluations.
    tokens_per_step: None where it is not known."""

    index: int
    tokens_per_step: int | None
    steps: tuple[int, ...]
    losses: tuple[float | None, ...]
    held_out: tuple[tuple[int, float], ...]


def running_rows(directory: Path, rows: Sequence[Row]) -> tuple[Row, ...]:
    """Returns a row for each point below a sweep's directory that trains and has not ended. What was swept is read off
    the name of its directory, "optimizer.learning_rate=0.001,seed=1"."""
    ended = {row.directory for row in rows}
    found = sorted(path.parent.name for path in directory.glob(f"*/{METRICS}") if path.parent.name not in ended)
    first = max((row.index for row in rows), default=-1) + 1
    return tuple(_running(first + n, name) for n, name in enumerate(found))


def _running(index: int, name: str) -> Row:
    words = tuple(text for text in name.split(",") if "=" in text)
    swept = {key: value for key, _, value in (text.partition("=") for text in words)}
    return Row(index=index, overrides=words, swept=swept, status="running", directory=name)


def read_curves(directory: Path, rows: Sequence[Row]) -> tuple[Curve, ...]:
    """Returns the curve of each point that trained, also of one that failed later or is running."""
    found = [(row, directory / row.directory / METRICS) for row in rows if row.directory is not None]
    found = [(row, path) for row, path in found if path.is_file()]
    most = max(LEAST, min(MOST, NUM_SAMPLES // max(1, len(found))))
    curves = (_curve(row, path, most) for row, path in found)
    return tuple(curve for curve in curves if curve is not None)


def _curve(row: Row, path: Path, most: int) -> Curve | None:
    steps: list[int] = []
    losses: list[float | None] = []
    held_out: list[tuple[int, float]] = []
    for line in path.read_bytes().splitlines():
        try:
            value = parse_json(line)
        except ValueError:  # the last line of a run that goes on, or was killed
            continue
        if not isinstance(value, dict) or type(value.get("step")) is not int:
            continue
        steps.append(value["step"])
        losses.append(_number(value.get("loss")))
        if (evaluated := _number(value.get("eval_loss"))) is not None:
            held_out.append((value["step"], evaluated))
    if not steps:
        return None
    kept = thinned(losses, most)
    tokens = row.figures.tokens_per_step if row.figures else None
    return Curve(row.index, tokens, tuple(steps[n] for n in kept), tuple(losses[n] for n in kept), tuple(held_out))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def thinned(values: Sequence[float | None], most: int) -> list[int]:
    """Returns the indices of at most `most` values that a curve is drawn by: of each stretch the least and the
    greatest, so that no spike is lost, and the first and last of all. A stretch with a None keeps it: a gap."""
    if len(values) <= most:
        return list(range(len(values)))
    num_stretches = (most - 2) // 3
    kept = {0, len(values) - 1}
    for n in range(num_stretches):
        stretch = range(n * len(values) // num_stretches, (n + 1) * len(values) // num_stretches)
        known = [(value, index) for index in stretch if (value := values[index]) is not None]
        kept |= {min(known)[1], max(known)[1]} if known else set()
        kept |= {next(index for index in stretch if values[index] is None)} if len(known) < len(stretch) else set()
    return sorted(kept)
