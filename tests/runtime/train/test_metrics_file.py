"""A resumed run reads its `metrics.jsonl` whatever happened to it: no step that can be read is lost."""

import json
import time
from pathlib import Path

import pytest

from meshloom.runtime.train.metrics import (
    KINDS,
    NOTHING,
    Metrics,
    Stopwatch,
    TimeSpent,
    spent_by_earlier_starts,
    take_time_spent,
)
from meshloom.runtime.train.trackers import MetricsLog


def _line(step: int) -> bytes:
    return json.dumps({"step": step, "loss": 1 / step}).encode() + b"\n"


FIVE = [_line(step) for step in range(1, 6)]
THREE = b"".join(FIVE[:3])


def _resumed(tmp_path: Path, content: bytes, *, first_step: int = 3) -> tuple[bytes, str | None, dict[str, bytes]]:
    """The file after a resume at `first_step`, the warning, and the files beside it."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    with MetricsLog(tmp_path, first_step=first_step) as log:
        pass
    beside = {each.name: each.read_bytes() for each in tmp_path.iterdir() if each != path}
    return path.read_bytes(), log.warning, beside


def test_steps_that_are_done_again_are_dropped(tmp_path):
    assert _resumed(tmp_path, b"".join(FIVE)) == (THREE, None, {})


@pytest.mark.parametrize("size", range(1, len(FIVE[4])))
def test_a_line_that_a_kill_cut_off_is_dropped_without_a_word(tmp_path, size):
    assert _resumed(tmp_path, b"".join(FIVE[:4]) + FIVE[4][:size]) == (THREE, None, {})


DAMAGES = {
    "NUL tail": (THREE + bytes(512), "line 4 holds no step"),
    "NUL tail in a line": (THREE + FIVE[3][:9] + bytes(512), "line 4 holds no step"),
    "NUL line": (FIVE[0] + bytes(30) + b"\n" + b"".join(FIVE[1:]), "line 2 holds no step"),
    "blank line": (b"\n".join([FIVE[0], *FIVE[1:]]), "lines, from line 2 on, hold no step"),
    "blank last line": (THREE + b"\n", "line 4 holds no step"),
    "spaces": (THREE + b"   ", "line 4 holds no step"),
    "garbage": (THREE + b"\x8f\xff\xfe garbage\n" + FIVE[3], "line 4 holds no step"),
    "garbage tail": (THREE + b"garbage", "line 4 holds no step"),
    "torn in the middle": (FIVE[0] + FIVE[1][:7] + b"\n" + b"".join(FIVE[1:]), "line 2 holds no step"),
    "other JSON": (THREE + b"[]\nnull\n7\n{}\n", "4 lines, from line 4 on, hold no step"),
    "a step that is not a number": (THREE + b'{"step": "3"}\n{"step": true}\n{"step": null}\n', "3 lines, from line 4"),
    "deep": (THREE + b"[" * 100_000 + b"\n", "line 4 holds no step"),
    "a huge number": (THREE + b'{"step": ' + b"9" * 5000 + b"}\n", "line 4 holds no step"),
    "UTF-16": (THREE + THREE.decode().encode("utf-16"), "hold no step"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_of_a_damaged_file_every_readable_step_is_kept_and_a_copy_of_all(tmp_path, name):
    content, words = DAMAGES[name]
    kept, warning, beside = _resumed(tmp_path, content)
    assert kept == THREE
    assert words in (warning or "")
    assert beside == {"metrics.jsonl.damaged": content}
    assert (warning or "").endswith(f"{tmp_path}/metrics.jsonl.damaged")


def test_a_line_cut_off_whose_step_is_not_done_again_is_damage(tmp_path):
    content = THREE[:-5]
    kept, warning, beside = _resumed(tmp_path, content)
    assert kept == b"".join(FIVE[:2])
    assert "line 3 holds no step" in (warning or "")
    assert beside == {"metrics.jsonl.damaged": content}


def test_a_whole_line_without_its_end_is_kept(tmp_path):
    assert _resumed(tmp_path, THREE[:-1]) == (THREE, None, {})


def test_an_older_damaged_copy_is_not_written_over(tmp_path):
    (tmp_path / "metrics.jsonl.damaged").write_bytes(b"first")
    _, warning, beside = _resumed(tmp_path, THREE + bytes(3))
    assert (warning or "").endswith("metrics.jsonl.damaged1")
    assert beside == {"metrics.jsonl.damaged": b"first", "metrics.jsonl.damaged1": THREE + bytes(3)}


def test_a_resumed_file_goes_on_in_whole_lines(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(FIVE[:4]) + b'{"step": 5, "lo')
    with MetricsLog(tmp_path, first_step=4) as log:
        log.step_reported(Metrics(5, float("nan"), None, 1.0, 0.1, False, 1.0, 1.0, 0.0, 256, None, 256, 0.0, NOTHING))
    values = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [value["step"] for value in values] == [1, 2, 3, 4, 5]
    assert values[-1]["loss"] is None


def _spent(at: float, num_starts: int = 1, **seconds: float) -> dict[str, float]:
    """A line of `metrics.jsonl` written at this time."""
    return {"time": at, **TimeSpent(num_starts, dict.fromkeys(KINDS, 0.0) | seconds).as_metrics()}


def test_each_second_goes_to_the_innermost_kind():
    began = time.time() - 5
    watch = Stopwatch(began)
    with watch.spending("steps"):
        with watch.spending("save"):
            time.sleep(0.02)
        time.sleep(0.04)
        watch.move(0.01, to="input")
    at_least = time.time() - began
    spent = watch.by_this_start()
    assert at_least - 0.001 <= spent.total <= time.time() - began + 0.001  # of another clock
    assert spent.seconds["save"] >= 0.02
    assert spent.seconds["input"] == 0.01
    assert spent.seconds["steps"] >= 0.03
    assert spent.seconds["start"] >= 5


def test_of_an_earlier_start_what_is_done_again_and_the_time_between_are_lost():
    """Killed 12 s after the checkpoint of which the line at 100 tells, started 30 s later."""
    kept = _spent(100.0, start=10, compile=30, steps=60)
    last = _spent(112.0, start=10, compile=30, steps=70, evaluation=2)
    earlier = spent_by_earlier_starts(kept, last, began=142.0)
    assert (earlier.num_starts, earlier.total) == (1, 142.0)
    assert earlier.seconds["redone"] == 12
    assert earlier.seconds["down"] == 30
    assert earlier.seconds["steps"] == 60


def test_what_several_starts_lost_adds_up():
    kept = _spent(200.0, 2, start=20, compile=60, steps=100, redone=12, down=8)
    last = _spent(210.0, 2, start=20, compile=60, steps=110, redone=12, down=8)
    earlier = spent_by_earlier_starts(kept, last, began=215.0)
    assert (earlier.num_starts, earlier.seconds["redone"], earlier.seconds["down"]) == (2, 22, 13)


def test_without_a_checkpoint_all_of_an_earlier_start_is_lost():
    earlier = spent_by_earlier_starts(None, _spent(50.0, start=10, steps=40), began=50.0)
    assert earlier.seconds == dict.fromkeys(KINDS, 0.0) | {"redone": 50.0}


def test_lines_that_say_nothing_of_time_count_as_no_start():
    assert spent_by_earlier_starts({"step": 1}, {"step": 2}, began=9.0) == NOTHING
    assert spent_by_earlier_starts(None, None, began=9.0) == NOTHING


def test_a_line_is_read_back_as_it_was():
    spent = TimeSpent(3, dict(zip(KINDS, range(10), strict=True)))
    assert take_time_spent(spent.as_metrics()) == spent
    assert spent.goodput == 3 / 45
