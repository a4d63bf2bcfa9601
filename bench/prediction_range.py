"""The range of predictions, by kind of program: so wide that 9 of 10 runs lie in the range that the others give.

Each run of a kind is left out in turn, and the range has to hold 9 of 10 of them. Of n runs that do not depend on one
another, the next one stays below the k-th smallest error with a probability of k / (n + 1) (split conformal prediction,
Vovk et al. 2005), so k is 0.9 (n + 1). Fewer than nine runs have no such error: there the range is what normal errors
around zero need, by Student's t with as many degrees of freedom as there are runs.

Runs of one laboratory, of one layout or of one chip are off in the same way. So the range of dense runs, which are
many, is no narrower than what 8 of 10 of the checked runs of a whole left-out group need, for each group of three
groupings. In a group of fewer than five runs, 8 of 10 would be all of them, so such groups count together, if they have
five.

The range of any other kind is no narrower than a dense run's. Only that of low precision may be: its runs are pairs
(precision.py), whose errors are those of what float8 gains. A step in float8 has the errors of its other kinds, too,
with which meshloom.compiler.target.accuracy combines them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args
from urllib.parse import urlparse

from published_recipes import Recipe

from meshloom.compiler.plan import Plan
from meshloom.compiler.target.accuracy import COVERED, LOW_PRECISION, ProgramKind

Basis = Literal["compiled", "estimated"]
Grouping = Literal["source", "kind", "chip"]
BASES: tuple[Basis, ...] = ("compiled", "estimated")
GROUPINGS: tuple[Grouping, ...] = ("source", "kind", "chip")
OF_GROUP = 8, 10  # runs of a left-out group in the range that the others give
FEW = 5  # runs of a group that counts by itself, at least
# Of normal errors around zero 9 of 10 are below this many times the root of the mean square of 1, 2, .. 8 others: 0.95
# quantiles of Student's t
STUDENT_T = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860)


@dataclass(frozen=True)
class Run:
    """A published run. source: the repository or site that published it. compiled, estimated: the published seconds
    over those that its compiled schedule, and the estimate without a compiler, predict; one that is not compiled has
    its estimate for both. is_checked: no constant was chosen by it."""

    recipe: str
    chip: str
    source: str
    kind: str
    compiled: float
    estimated: float
    is_checked: bool = True

    def error(self, basis: Basis) -> float:
        """Returns by how much a prediction was off, as the logarithm of a factor, whether too long or too short."""
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
    """Returns the kind of a recipe, the first that applies; of a dense one how it lies over the mesh."""
    kind, sizes = plan.kinds[0], plan.mesh.sizes
    if kind != "dense":
        return kind
    return "tensor" if sizes.get("tensor", 1) > 1 else "replicas" if sizes.get("replica", 1) > 1 else "fully sharded"


def factor_of(runs: Sequence[Run], basis: Basis, chip: str, least: float = 0.0) -> float:
    """Returns the factor of the range of a chip's predictions, by the runs of a kind that have one: so wide that 9 of
    10 left-out runs lie inside, no less than `least`, and no less than the largest error of the chip's checked runs."""
    return math.exp(max(least, _base(runs, basis), *_own(runs, basis, chip)))


def _base(runs: Sequence[Run], basis: Basis) -> float:
    if len(runs) <= len(STUDENT_T):
        squares = [run.error(basis) ** 2 for run in runs]
        return STUDENT_T[len(runs) - 1] * math.sqrt(sum(squares) / len(runs))
    needed = [_needed([other for other in runs if other is not run], [run], basis)[0] for run in runs]
    return _smallest(needed, len(runs) + 1, COVERED)


def _own(runs: Sequence[Run], basis: Basis, chip: str) -> list[float]:
    return [0.0, *(run.error(basis) for run in runs if run.chip == chip and run.is_checked)]


def _smallest(errors: Iterable[float], total: int, covered: tuple[int, int]) -> float:
    """Returns the error that at least this share of a total number of runs does not exceed."""
    most, of = covered
    return sorted(errors)[math.ceil(most * total / of) - 1]


def find_least(runs: Sequence[Run], basis: Basis) -> float:
    """Returns the error, as the logarithm of a factor, that 8 of 10 runs of each left-out group stay below, those that
    are in the range of their chip's other runs anyway left aside."""
    least = 0.0
    for grouping in GROUPINGS:
        groups = [_needed(kept, left, basis) for kept, left in left_out(runs, grouping)]
        large = [each for each in groups if len(each) >= FEW]
        small = [error for each in groups if len(each) < FEW for error in each]
        for errors in (*large, *([small] if len(small) >= FEW else [])):
            if errors:
                least = max(least, _smallest(errors, len(errors), OF_GROUP))
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
        inside = sum(_is_inside(run, basis, factor_of(kept, basis, run.chip, least)) for run in left)
        found[getattr(left[0], grouping)] = Coverage(inside, len(left))
    return found


def coverage_of_kind(runs: Sequence[Run], kind: ProgramKind, basis: Basis) -> Coverage:
    """Returns how many runs of a kind lie in the range that it has without them, each left out in turn."""
    own, inside = of_kind(runs, kind), 0
    for run in own:
        others = [other for other in runs if other is not run]
        inside += _is_inside(run, basis, kind_factor(others, kind, basis, run.chip))
    return Coverage(inside, len(own))


def _is_inside(run: Run, basis: Basis, factor: float) -> bool:
    return run.error(basis) <= math.log(factor) + 1e-12


def of_kind(runs: Iterable[Run], kind: ProgramKind) -> list[Run]:
    """Returns the runs of a kind. A dense run has the kind of its layout (kind_of)."""
    others = get_args(ProgramKind)[1:]
    return [run for run in runs if run.kind == kind or (kind == "dense" and run.kind not in others)]


def checked_dense(runs: Iterable[Run]) -> list[Run]:
    """Returns the dense runs that chose nothing."""
    return [run for run in of_kind(runs, "dense") if run.is_checked]


def kind_factor(runs: Sequence[Run], kind: ProgramKind, basis: Basis, chip: str) -> float:
    """Returns the factor of the range of a kind on a chip: "*" for one without runs."""
    if kind == LOW_PRECISION:
        return factor_of(of_kind(runs, kind), basis, chip)
    usual = factor_of(of_kind(runs, "dense"), basis, chip, find_least(checked_dense(runs), basis))
    return usual if kind == "dense" else max(usual, factor_of(of_kind(runs, kind), basis, chip))


def table_of(runs: Sequence[Run], best_mfu: Mapping[str, float]) -> dict[str, Any]:
    """Returns accuracy.json: the factors by kind of program, basis and chip, with the number of runs on each chip that
    they come from, the coverage of left-out groups of dense runs, and all runs. best_mfu: of all published runs of a
    chip."""
    chips, kinds = ("*", *dict.fromkeys(run.chip for run in runs)), {}
    for kind in get_args(ProgramKind):
        kinds[kind] = {"num_runs": dict(Counter(run.chip for run in of_kind(runs, kind)))}
        for basis in BASES:
            kinds[kind][basis] = {chip: round(kind_factor(runs, kind, basis, chip), 4) for chip in chips}
    checked, left = checked_dense(runs), {}
    for basis in BASES:
        least = find_least(checked, basis)
        left[basis] = {grouping: summed(coverage(checked, basis, grouping, least)) for grouping in GROUPINGS}
    return {
        "source": "python bench/published.py",
        "kinds": kinds,
        "num_sources": len({run.source for run in runs}),
        "left_out": left,
        "best_mfu": dict(best_mfu),
        "runs": [asdict(run) for run in runs],
    }


def summed(groups: Mapping[str, Coverage]) -> list[int]:
    return [sum(each.inside for each in groups.values()), sum(each.total for each in groups.values())]
