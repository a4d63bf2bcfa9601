"""Sources of collectives, written as reports show them."""

import re
from typing import Literal, cast

from meshloom.compiler.core.scopes import Pass
from meshloom.compiler.core.traffic import TrafficSource

BY_SIZE = " (inferred from its size)"


def origin(text: str) -> TrafficSource:
    """'layers/mlp/up_EM and 2 more, backward' -> what it says. A name with a slash is a parameter."""
    said = re.fullmatch(
        r"(.*?)(?: and (\d+) more)?(?:, (forward|backward|recomputed|update))?", text.removesuffix(BY_SIZE)
    )
    assert said is not None
    name, *others = said[1].removeprefix("one of ").split(", ") if said[1].startswith("one of ") else [said[1]]
    is_parameter = re.fullmatch(r"[\w/]+/\w+", name) is not None
    found = TrafficSource(
        parameter=name if is_parameter else "",
        activation="" if is_parameter or name == "made by the compiler" else name,
        others=tuple(others),
        num_more=int(said[2] or 0),
        is_inferred=text.endswith(BY_SIZE),
        in_pass=cast(Pass | Literal[""], said[3] or ""),
    )
    assert str(found) == text
    return found
