"""A resumed run reads its `metrics.jsonl` whatever happened to it: no step that can be read is lost."""

import json
from pathlib import Path

import pytest

from meshloom.runtime.train.metrics import NOTHING, Metrics
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
