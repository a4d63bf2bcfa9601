"""The range of predictions, by kind of program: as wide as runs need that nothing like them was seen before.

Runs of one laboratory, of one layout or of one chip are off in the same way, so that leaving out one run at a time says
little about the next source. Here a whole group of dense runs is left out, and the range that the others give is tried
on it, for each group of three groupings. The range is no narrower than what 8 of 10 runs of each left-out group need.
In a group of fewer than five runs, 8 of 10 would be all of them, so such groups count together, if they have five.

Of any other kind the range is no narrower than that, nor than what its own runs need. Where they are few, it rests on
published runs, too, that are no rows of published_recipes.py (UNSEEN).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args
from urllib.parse import urlparse

from published_recipes import Recipe

from meshloom.compiler.plan import Plan
from meshloom.compiler.target.accuracy import COVERED, ProgramKind

Basis = Literal["compiled", "estimated"]
Grouping = Literal["source", "kind", "chip"]
BASES: tuple[Basis, ...] = ("compiled", "estimated")
GROUPINGS: tuple[Grouping, ...] = ("source", "kind", "chip")
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


# Steps of kinds with few rows: of 45 published ones that nobody here had chosen, as they were predicted before links of
# GPUs and groups of experts had measured prices; and of pipelines, estimated with another recomputation than the
# published one (docs/results/published_pipelines.md). Where only one of both predictions was made, it counts as both.
TPU_RECIPES, AXLEARN = "AI-Hypercomputer/tpu-recipes", "apple/axlearn"
LLAMA, STEPS = "arXiv:2407.21783", "one of the 45 steps"
UNSEEN = (
    Run("DeepSeek-V3, v5p-1024", "v5p", TPU_RECIPES, "experts on TPUs", 1 / 0.79, 1 / 0.79),
    Run("DeepSeek-V3, 128 Ironwood", "tpu7x", TPU_RECIPES, "experts on TPUs", 1 / 1.32, 1 / 1.32),
    Run("Qwen3-30B-A3B, 8 H100", "h100", STEPS, "experts on GPUs", 1 / 1.41, 1 / 1.58),
    Run("experts over a mesh, H100, the farthest", "h100", STEPS, "experts on GPUs", 1 / 1.41, 1 / 1.78),
    Run("data parallel, v5p, the nearest", "v5p", AXLEARN, "data parallel", 1 / 0.83, 1 / 0.83),
    Run("data parallel, v5p, the farthest", "v5p", AXLEARN, "data parallel", 1 / 0.38, 1 / 0.38),
    Run("Gemma 3 12B, 32k tokens, 4 x v6e-256", "v6e", STEPS, "several slices", 1 / 0.82, 1 / 0.82),
    Run("several slices, the farthest", "v6e", STEPS, "several slices", 1 / 0.76, 1 / 0.76),
    Run("70B, 128k tokens, 256 Ironwood", "tpu7x", TPU_RECIPES, "long context", 34.0 / 41.6, 34.0 / 41.6),
    Run("Llama 3.1 405B, 8,192 H100", "h100", LLAMA, "pipelines", 344 / 430, 344 / 430),
    Run("Llama 3.1 405B, 16,384 H100", "h100", LLAMA, "pipelines", 314 / 400, 314 / 400),
)


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


def dense(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run.kind not in get_args(ProgramKind)]


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
        small = [error for each in groups if len(each) < FEW for error in each]
        for errors in (*large, *([small] if len(small) >= FEW else [])):
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
    """Returns accuracy.json: the factors by kind of program, basis and chip, the coverage of left-out groups of dense
    runs, and all runs. best_mfu: of all published runs of a chip."""
    plain = dense(runs)
    least: dict[Basis, float] = {basis: find_least(plain, basis) for basis in BASES}
    usual = _factors(plain, least, dict.fromkeys(run.chip for run in runs))
    return {
        "source": "python bench/published.py",
        "kinds": {kind: usual if kind == "dense" else _of_kind(kind, runs, usual) for kind in get_args(ProgramKind)},
        "num_sources": len({run.source for run in runs}),
        "left_out": {
            basis: {grouping: summed(coverage(plain, basis, grouping, least[basis])) for grouping in GROUPINGS}
            for basis in BASES
        },
        "best_mfu": dict(best_mfu),
        "runs": [asdict(run) for run in runs],
        "unseen": [asdict(run) for run in UNSEEN],
    }


def _factors(runs: Sequence[Run], least: Mapping[Basis, float], chips: Iterable[str]) -> dict[str, Any]:
    """Returns the factors of a kind by basis and chip, and the number of its runs on each chip."""
    found: dict[str, Any] = {"num_runs": dict(Counter(run.chip for run in runs))}
    for basis in BASES:
        found[basis] = {chip or "*": round(factor_of(runs, basis, chip, least[basis]), 4) for chip in ("", *chips)}
    return found


def _of_kind(kind: str, runs: Sequence[Run], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the factors of a kind that is not dense. usual: of dense runs, which are the least."""
    own = [run for run in runs if run.kind == kind]
    if len(own) < FEW:
        own += [run for run in UNSEEN if run.kind == kind]
    least: dict[Basis, float] = dict.fromkeys(BASES, 0.0)
    found = _factors(own, least, usual["compiled"].keys() - {"*"})
    for basis in BASES:
        found[basis] = {chip: max(factor, found[basis][chip]) for chip, factor in usual[basis].items()}
    return found


def summed(groups: Mapping[str, Coverage]) -> list[int]:
    return [sum(each.inside for each in groups.values()), sum(each.total for each in groups.values())]
