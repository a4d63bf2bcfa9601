"""Gives the parameters of a test their tiers."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiered(
    names: Iterable[str], *, plain: Collection[str], release: Collection[str] = (), is_halved: bool = False
) -> list[Any]:
    """Returns a test's parameters: `plain` names are of the plain tier, `release` names of the last, others of `ci`.

    is_halved: of the others, the first, the third and so on are of `ci`, and those between them of `release`.
    """
    names = list(names)
    assert {*plain, *release} <= {*names}, {*plain, *release} - {*names}
    later = [name for name in names if name not in plain and name not in release]
    release = {*release, *(later[1::2] if is_halved else ())}
    mark = {name: pytest.mark.release if name in release else pytest.mark.ci for name in names if name not in plain}
    return [pytest.param(name, marks=mark[name]) if name in mark else name for name in names]
