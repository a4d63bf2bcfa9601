"""Directories of points: named by their overrides, safe, and each different."""

import string

from hypothesis import given
from hypothesis import strategies as st

from meshloom.runtime.sweep.rows import MOST_NAME_BYTES, directory_name, swept_of

SAFE = set(string.ascii_letters + string.digits + "._=@,+-")


def test_a_directory_is_named_as_its_overrides_are_typed():
    assert directory_name(["mesh.tensor=4", "remat=full"]) == "mesh.tensor=4,remat=full"
    assert directory_name(["optimizer.learning_rate=1e-3"]) == "optimizer.learning_rate=1e-3"


@given(st.lists(st.text(max_size=120), max_size=4))
def test_every_name_is_safe(overrides):
    name = directory_name(overrides)
    assert set(name) <= SAFE
    assert 0 < len(name.encode()) <= MOST_NAME_BYTES
    assert not name.startswith((".", "-")), "neither hidden nor a flag"


@given(st.sets(st.tuples(st.text(), st.text()), min_size=2, max_size=5))
def test_different_overrides_have_different_names(points):
    points = {(f"a={first}", f"b={second}") for first, second in points}
    assert len({directory_name(point) for point in points}) == len({",".join(point) for point in points})


def test_swept_overrides_are_found_as_they_were_typed():
    overrides = ["++num_steps=3", "model=tiny", "++mesh.tensor=4", "+experiment=smoke"]
    assert swept_of(overrides, ["mesh.tensor", "experiment"]) == ["mesh.tensor=4", "experiment=smoke"]
