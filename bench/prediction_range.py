"""The range of predictions: as wide as runs need that nothing like them was seen before.

Runs of one laboratory, of one kind of program or of one chip are off in the same way, so that leaving out one run at a
time says little about the next source. Here a whole group is left out, and the range that the others give is tried on
it, for each group of three groupings. The range is no narrower than what 8 of 10 runs of each left-out group need.
In a group of fewer than five runs, 8 of 10 would be all of them, so such groups count together.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import urlparse

from published_recipes import Recipe

from meshloom.compiler.plan import Plan
from meshloom.compiler.target.accuracy import COVERED

Basis = Literal["compiled", "estimated"]
Grouping = Literal["source", "kind", "chip"]
BASES: tuple[Basis, ...] = ("compiled", "estimated")
GROUPINGS: tuple[Grouping, ...] = ("source", "kind", "chip")
LONG = 32768  # tokens of a sequence
FEW = 5  # runs of a group that counts by itself, at least


@dataclass(frozen=True)
class Run:
    """A checked run. source: the repository or site that published it. compiled, estimated: the published seconds over
    those that its compiled schedule, and the estimate without a compiler, predict."""

    recipe: str
    chip: str
    source: str
    kind: str
    compiled: float
    estimated: float

    def error(self, basis: Basis) -> float:
        """Returns by how much a prediction was off, as the logarithm of a factor: too long and too short alike."""
        return abs(math.log(getattr(self, basis)))


@dataclass(frozen=True)
class Coverage:
    """inside: of the left-out runs of a group those in the range that the others give."""

    inside: int
    total: int


def source_of(recipe: Recipe) -> str:
    """Returns the repository, or the site."""
    where = urlparse(recipe.source)
    return "/".join(where.path.split("/")[1:3]) if where.netloc == "github.com" else where.netloc


def kind_of(plan: Plan) -> str:
    """Returns what kind of program a recipe is: the first that applies."""
    sizes, spec = plan.mesh.sizes, plan.spec
    if plan.model.num_active_experts is not None:
        return "experts"
    if spec.sequence_length >= LONG or sizes.get("context", 1) > 1:
        return "long context"
    if plan.target.num_slices > 1:
        return "several slices"
    if sizes.get("tensor", 1) > 1:
        return "tensor"
    return "replicas" if sizes.get("replica", 1) > 1 else "fully sharded"


def factor_of(runs: Sequence[Run], basis: Basis, chip: str, least: float) -> float:
    """Returns the factor of the range of a chip's predictions: the error that 8 of 10 of the runs stay below, no less
    than `least`, and no less than the largest of the chip's own.

    Of n runs, the next one stays below the k-th smallest error with a probability of k / (n + 1) (split conformal
    prediction, Vovk et al. 2005), where runs do not depend on one another; `least` is for those that do."""
    return math.exp(max(least, _base(runs, basis), *_own(runs, basis, chip)))


def _base(runs: Sequence[Run], basis: Basis) -> float:
    return _quantile([run.error(basis) for run in runs])


def _own(runs: Sequence[Run], basis: Basis, chip: str) -> list[float]:
    return [0.0, *(run.error(basis) for run in runs if run.chip == chip)]


def _quantile(values: Iterable[float]) -> float:
    ordered = sorted(values)
    most, of = COVERED
    return ordered[min(len(ordered), math.ceil(most * (len(ordered) + 1) / of)) - 1]


def find_least(runs: Sequence[Run], basis: Basis) -> float:
    """Returns the error, as the logarithm of a factor, that 8 of 10 runs of each left-out group stay below, those that
    are in the range of their chip's other runs anyway left aside."""
    most, of = COVERED
    least = 0.0
    for grouping in GROUPINGS:
        groups = [_needed(kept, left, basis) for kept, left in left_out(runs, grouping)]
        large = [each for each in groups if len(each) >= FEW]
        for errors in (*large, [error for each in groups if len(each) < FEW for error in each]):
            if errors:
                least = max(least, sorted(errors)[math.ceil(most * len(errors) / of) - 1])
    return least


def _needed(kept: Sequence[Run], left: Sequence[Run], basis: Basis) -> list[float]:
    """Returns the error of each left-out run; 0 where the others of its chip cover it."""
    return [0.0 if run.error(basis) <= max(_own(kept, basis, run.chip)) else run.error(basis) for run in left]


def left_out(runs: Sequence[Run], grouping: Grouping) -> Iterable[tuple[list[Run], list[Run]]]:
    """Yields (the other runs, the runs of a group) for each group."""
    for group in dict.fromkeys(getattr(run, grouping) for run in runs):
        kept = [run for run in runs if getattr(run, grouping) != group]
        if kept:
            yield kept, [run for run in runs if getattr(run, grouping) == group]


def coverage(runs: Sequence[Run], basis: Basis, grouping: Grouping, least: float) -> dict[str, Coverage]:
    """Returns how many runs of each group lie in the range that the other groups give."""
    found = {}
    for kept, left in left_out(runs, grouping):
        inside = sum(run.error(basis) <= math.log(factor_of(kept, basis, run.chip, least)) + 1e-12 for run in left)
        found[getattr(left[0], grouping)] = Coverage(inside, len(left))
    return found


def table_of(runs: Sequence[Run], best_mfu: Mapping[str, float]) -> dict[str, Any]:
    """Returns accuracy.json: the runs, the factors by basis and chip, and the coverage of left-out groups. best_mfu: of
    all published runs of a chip."""
    least = {basis: find_least(runs, basis) for basis in BASES}
    chips = dict.fromkeys(run.chip for run in runs)
    return {
        "source": "python bench/published.py",
        "num_runs": {chip: sum(run.chip == chip for run in runs) for chip in chips},
        "num_sources": len({run.source for run in runs}),
        "factors": {
            basis: {"*": round(factor_of(runs, basis, "", least[basis]), 4)}
            | {chip: round(factor_of(runs, basis, chip, least[basis]), 4) for chip in chips}
            for basis in BASES
        },
        "left_out": {
            basis: {grouping: summed(coverage(runs, basis, grouping, least[basis])) for grouping in GROUPINGS}
            for basis in BASES
        },
        "best_mfu": dict(best_mfu),
        "runs": [asdict(run) for run in runs],
    }


def summed(groups: Mapping[str, Coverage]) -> list[int]:
    return [sum(each.inside for each in groups.values()), sum(each.total for each in groups.values())]
