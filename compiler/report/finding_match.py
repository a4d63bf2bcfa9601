"""Pairs the findings of two reports that are the same: a compiler may change their places and their figures."""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..schema import Finding

Pair = tuple[Finding, Finding]


def pair_findings(
    a: Sequence[Finding], b: Sequence[Finding], paths: Collection[str]
) -> tuple[list[Pair], list[Finding], list[Finding]]:
    """Returns each of a with its like of b; those of a that have none; those of b. paths: of all parameters.

    What is the same is paired first, then what says the same of other places, then what is of the same rule about the
    same parameter, in other figures; of a rule that is about no parameter, in other figures alone.
    """
    keys: tuple[Callable[[Finding], Any], ...] = (
        lambda f: f,
        lambda f: (f.rule, f.what),
        lambda f: (f.rule, _without_figures(f.what), parameter_of(f, paths)),
    )
    left, right = (sorted(side, key=lambda f: (f.rule, f.what, f.where)) for side in (a, b))
    pairs: list[Pair] = []
    for key in keys:
        for one in list(left):
            if (other := next((f for f in right if key(f) == key(one)), None)) is not None:
                pairs.append((one, other))
                left.remove(one)
                right.remove(other)
    return pairs, left, right


def parameter_of(finding: Finding, paths: Collection[str]) -> str | None:
    """Returns the one that its words name, or else its first place: '9 places: layers/mlp/up_EM and 8 more, backward;
    ...'."""
    words = [*re.findall(r"[\w/]+", finding.what), *re.findall(r"^(?:one of )?([\w/]+)", first_place(finding))]
    return next((word for word in words if word in paths), None)


def first_place(finding: Finding) -> str:
    """Returns the most costly of several."""
    return re.sub(r"^\d+ places: ", "", finding.where).split("; ")[0]


def _without_figures(text: str) -> str:
    return re.sub(r"\d[\d.,]*", "#", text)
