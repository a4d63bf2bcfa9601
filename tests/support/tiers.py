"""Tells the tier of a test, and gives the parameters of one their tiers."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

TIERS = ("plain", "ci", "release")


def tier_of(item: pytest.Item) -> str:
    """Returns the tier that runs a test: of several marks, the last one."""
    marked = next((tier for tier in reversed(TIERS[1:]) if item.get_closest_marker(tier)), TIERS[0])
    cases = item.get_closest_marker("cases")
    return max(marked, _tier_of_case(item, **cases.kwargs), key=TIERS.index) if cases else marked


def _tier_of_case(item: pytest.Item, *, plain: int, ci: int | None = None) -> str:
    """Returns the tier of a case of `@pytest.mark.cases`: so many of a test's first cases are plain, those before the
    number `ci` are of that tier, and others of a release."""
    place = max(item.callspec.indices.values())  # pyright: ignore[reportAttributeAccessIssue]
    return TIERS[0] if place < plain else TIERS[1] if ci is None or place < ci else TIERS[2]


def tiered(
    names: Iterable[str], *, plain: Collection[str], ci: Collection[str] | None = None, release: Collection[str] = ()
) -> list[Any]:
    """Returns a test's parameters: `plain` names are of the plain tier, `release` names of the last, others of `ci`.
    With names of `ci`, the others are of the last tier."""
    names = list(names)
    if ci is not None:
        assert {*ci} <= {*names}, {*ci} - {*names}
        release = [name for name in names if name not in plain and name not in ci]
    assert {*plain, *release} <= {*names}, {*plain, *release} - {*names}
    mark = {name: pytest.mark.release if name in release else pytest.mark.ci for name in names if name not in plain}
    return [pytest.param(name, marks=mark[name]) if name in mark else name for name in names]
