"""Each question that a mask answers by arithmetic, against all pairs of a query and a key."""

import ast
from pathlib import Path

import numpy as np
import pytest

import meshloom
from meshloom.models.attention import Mask

ROOT = Path(meshloom.__file__).resolve().parent
LENGTH = 24
WINDOWS = (None, 1, 2, 5, 6, 7, 23, 24, 40)
KNOWS_WINDOWS = {
    "models/attention.py",
    "models/decoder.py",  # makes masks of a config
    "compiler/parallel/attention/cudnn.py",  # hands the window to its kernel
}


def pairs(window):
    return np.array([[key <= query < key + (window or LENGTH) for key in range(LENGTH)] for query in range(LENGTH)])


@pytest.mark.parametrize("window", WINDOWS)
def test_all_answers_are_those_of_single_pairs(window):
    mask, seen, places = Mask(window), pairs(window), np.arange(LENGTH)
    np.testing.assert_array_equal(mask.sees(places[:, None] - places), seen)
    np.testing.assert_array_equal(mask(places[:, None], places), seen)
    np.testing.assert_array_equal(mask.num_keys(places), seen.sum(axis=1))
    assert mask.num_pairs(LENGTH) == seen.sum()
    assert mask.sees_all_before is (window is None)
    assert mask.within(LENGTH).sees_all_before is bool((seen == pairs(None)).all())


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(4, 4), (6, 4), (4, 12), (1, 1)])
def test_what_blocks_see_of_each_other_is_what_their_pairs_do(window, num_queries, num_keys):
    mask = Mask(window)
    blocks = pairs(window).reshape(LENGTH // num_queries, num_queries, LENGTH // num_keys, num_keys)
    distance = np.arange(0, LENGTH, num_queries)[:, None] - np.arange(0, LENGTH, num_keys)
    np.testing.assert_array_equal(mask.sees_any(distance, num_queries, num_keys), blocks.any(axis=(1, 3)))
    np.testing.assert_array_equal(mask.sees_all(distance, num_queries, num_keys), blocks.all(axis=(1, 3)))
    if num_queries == num_keys:
        reach = blocks.any(axis=(1, 3)).sum(axis=1).max() - 1
        assert mask.reach(num_keys, LENGTH // num_keys) == reach


def test_only_a_mask_and_those_who_make_one_name_a_window():
    """So that a new kind of mask is written in one place."""
    files = [*(ROOT / "models").glob("*.py"), *(ROOT / "compiler/parallel").rglob("*.py")]
    assert {str(file.relative_to(ROOT)) for file in files if _names_a_window(file)} == KNOWS_WINDOWS


def _names_a_window(file: Path) -> bool:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {getattr(node, key, None) for node in nodes for key in ("id", "attr", "arg")}
    return bool(names & {"window", "windows"}) or any(
        isinstance(n, ast.Constant) and n.value == "window" for n in nodes
    )
