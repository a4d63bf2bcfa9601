"""What the time of a run went to: each second counts once, and earlier starts are read off their lines."""

import time

from meshloom.runtime.train.metrics import (
    KINDS,
    NOTHING,
    Stopwatch,
    TimeSpent,
    spent_by_earlier_starts,
    take_time_spent,
)


def _line(at: float, num_starts: int = 1, **seconds: float) -> dict[str, float]:
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
    kept = _line(100.0, start=10, compile=30, steps=60)
    last = _line(112.0, start=10, compile=30, steps=70, evaluation=2)
    earlier = spent_by_earlier_starts(kept, last, began=142.0)
    assert (earlier.num_starts, earlier.total) == (1, 142.0)
    assert earlier.seconds["redone"] == 12
    assert earlier.seconds["down"] == 30
    assert earlier.seconds["steps"] == 60


def test_what_several_starts_lost_adds_up():
    kept = _line(200.0, 2, start=20, compile=60, steps=100, redone=12, down=8)
    last = _line(210.0, 2, start=20, compile=60, steps=110, redone=12, down=8)
    earlier = spent_by_earlier_starts(kept, last, began=215.0)
    assert (earlier.num_starts, earlier.seconds["redone"], earlier.seconds["down"]) == (2, 22, 13)


def test_without_a_checkpoint_all_of_an_earlier_start_is_lost():
    earlier = spent_by_earlier_starts(None, _line(50.0, start=10, steps=40), began=50.0)
    assert earlier.seconds == dict.fromkeys(KINDS, 0.0) | {"redone": 50.0}


def test_lines_that_say_nothing_of_time_count_as_no_start():
    assert spent_by_earlier_starts({"step": 1}, {"step": 2}, began=9.0) == NOTHING
    assert spent_by_earlier_starts(None, None, began=9.0) == NOTHING


def test_a_line_is_read_back_as_it_was():
    spent = TimeSpent(3, dict(zip(KINDS, range(10), strict=True)))
    assert take_time_spent(spent.as_metrics()) == spent
    assert spent.goodput == 3 / 45
