"""A dozen of the faults of bench/chaos.py, one after the other in a run, which ends as if there had been none."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[3] / "bench"
NUM_STEPS = 60
# kind, phase, process, call of the phase, delay, detail. The last one of a run lets it come to its end.
FAULTS = [
    [
        ("kill", "start", 0),
        ("terminate", "compile", 1),
        ("kill", "step", 0, 7),
        ("flip", "step", 0, 11, 0.0, "array"),
        ("freeze", "step", 1, 3),
        ("fill disk", "save", 0),
        ("truncate", "step", 0, 6, 0.0, "metrics"),
        ("restart coordinator", "step", 0, 5),
    ],
    [
        ("kill", "save", 1, 2, 0.01),
        ("kill", "evaluation", 0, 2),
        ("truncate", "step", 0, 6, 0.0, "compiled"),
        ("clock", "step", 1, 4, 0.0, "-3600"),
    ],
]


@pytest.fixture(scope="module")
def chaos() -> Iterator[Any]:
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("chaos")
    sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def undisturbed(chaos, tmp_path_factory) -> tuple[list[dict[str, Any]], Path]:
    """The metrics of the run that nothing disturbs, and its compiled programs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return chaos.undisturbed_run(folder / "run", folder / "cache", NUM_STEPS), folder / "cache"


@pytest.mark.ci
@pytest.mark.parametrize("faults", FAULTS, ids=["eight", "four"])
def test_a_run_survives_fault_after_fault(chaos, undisturbed, tmp_path, faults):
    metrics, cache = undisturbed
    assert [line["step"] for line in metrics] == list(range(1, NUM_STEPS + 1))
    chosen = [chaos.Fault(*fault) for fault in faults if fault[0] != "fill disk" or may_mount(tmp_path)]
    outcomes = chaos.recover(chosen, tmp_path, cache, metrics)
    assert [outcome.wrong for outcome in outcomes] == [[]] * len(chosen), outcomes
    assert any(outcome.from_step for outcome in outcomes)


def may_mount(folder: Path) -> bool:
    (place := folder / "mounted").mkdir()
    is_mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], capture_output=True, check=False)
    return is_mounted.returncode == 0 and subprocess.run(["umount", place], check=True).returncode == 0
