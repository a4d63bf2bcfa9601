"""Chooses a strategy for each site of each operation: by name where the declaration names one, else by cost."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..core.errors import ConfigError, Problem, raise_if_any, use_one_of
from ..sharding.arrays import OpSite
from ..spec.overlap_spec import AUTO, StrategyChoice
from .arithmetic import Multiplied, plan_arithmetic
from .operation import OpInputs, OpPlan, ParallelOp, Strategy

SiteStrategies = tuple[OpSite, tuple[Strategy, ...]]


def plan_operations(ops: Iterable[ParallelOp], inputs: OpInputs) -> tuple[OpPlan, ...]:
    """Chooses a strategy for each site of each operation, in the order of the registry.

    Raises ConfigError with all strategies that are named in `parallel` and are unknown or cannot run, and with all
    mistakes in the types of matmuls.
    """
    ops, declared = tuple(ops), inputs.spec.parallel
    kinds = [op.kind for op in ops if op.is_declared]
    problems = [
        Problem(f"parallel.{kind}", "there is no such operation", use_one_of(kind, kinds))
        for kind in declared
        if kind not in kinds
    ]
    planned: dict[str, tuple[OpPlan, ...]] = {}
    for op in ops:
        if late := [kind for kind in op.after if kind not in planned]:
            needed = ", ".join(late)
            raise ValueError(f"the operation '{op.kind}' has to come after {needed}, which it is planned from")
        made = replace(inputs, after=tuple(planned[kind] for kind in op.after))
        try:
            planned[op.kind] = _plan_operation(op, made, declared.get(op.kind, AUTO) if op.is_declared else AUTO)
        except ConfigError as error:
            problems += error.problems
            planned[op.kind] = _plan_operation(op, made, AUTO)
        problems += op.problems(made, planned[op.kind])
    plans = tuple(each for plans in planned.values() for each in plans)
    multiplied = [
        Multiplied(each.site, tuple(weights), each.op.why_not_few_bits(each, inputs.target))
        for each in plans
        if (weights := each.op.multiplied(each.site))
    ]
    precisions, wrong = plan_arithmetic(multiplied, inputs)
    raise_if_any([*problems, *wrong])
    return tuple(replace(each, precision=precisions.get(each.site)) for each in plans)


def _plan_operation(op: ParallelOp, inputs: OpInputs, declared: StrategyChoice) -> tuple[OpPlan, ...]:
    key = f"parallel.{op.kind}"
    ways = [(site, tuple(op.strategies(site, inputs))) for site in op.sites(inputs)]
    raise_if_any(_problems(op, key, ways, declared))
    return tuple(choose_strategy(op, site, strategies, _declared_at(site, declared)) for site, strategies in ways)


def _declared_at(site: OpSite, declared: StrategyChoice) -> str:
    """Returns the choice for a site: by its path (layers/mlp_up) before its name, which is that of all pieces."""
    if isinstance(declared, str):
        return declared
    return declared.get(site.path, declared.get(site.name, AUTO))


def choice_of(plans: Sequence[OpPlan]) -> dict[str, str]:
    """Returns the strategies of the sites that have a choice, as a declaration names them: by the name of a site, or by
    its path where the sites of that name have several."""
    open_ones = [each for each in plans if each.has_choice]
    chosen = {
        name: {one.chosen.name for one in open_ones if one.site.name == name}
        for name in {each.site.name for each in open_ones}
    }
    return {
        each.site.name if len(chosen[each.site.name]) == 1 else each.site.path: each.chosen.name for each in open_ones
    }


def chosen_or_fallback(plans: Sequence[OpPlan]) -> Sequence[StrategyChoice]:
    """Returns what a plan chose for the sites of an operation, and the fallback where `auto` chose another strategy."""
    if not plans:
        return ()
    fallback = plans[0].op.fallback
    is_fallback = all(each.chosen.name == fallback for each in plans)
    is_other = any(each.is_auto and each.chosen.name != fallback for each in plans)
    return (fallback if is_fallback else choice_of(plans), *((fallback,) if is_other else ()))


def _problems(op: ParallelOp, key: str, ways: Sequence[SiteStrategies], declared: StrategyChoice) -> list[Problem]:
    """Returns the mistakes in a declared choice. A strategy that is named for several sites has to run at one of
    them."""
    if isinstance(declared, str):
        if declared not in (AUTO, *op.names):
            return [Problem(key, f"'{declared}' is not a strategy", use_one_of(declared, (AUTO, *op.names)))]
        if declared in (AUTO, op.fallback):
            return []
        named = [(f"{site.name}: ", _named(strategies, declared)) for site, strategies in ways]
        if not named:
            what = f"'{declared}' cannot be used: the model has no such operation"
            return [Problem(key, what, f"set {key}={AUTO}")]
        return list(filter(None, [_cannot_be_used(op, key, named)]))
    return [problem for at, name in declared.items() if (problem := _problem_at(op, f"{key}.{at}", ways, at, name))]


def _problem_at(op: ParallelOp, where: str, ways: Sequence[SiteStrategies], at: str, name: str) -> Problem | None:
    """Returns the mistake in a choice for the sites of a name, or for the one of a path."""
    there = [strategies for site, strategies in ways if at in (site.path, site.name)]
    if not there:
        known = dict.fromkeys(site.path if "/" in at else site.name for site, _ in ways)
        return Problem(
            where, "the model has no operation of this name", use_one_of(at, known) if known else "leave it out"
        )
    if name not in (AUTO, *op.names):
        return Problem(where, f"'{name}' is not a strategy", use_one_of(name, (AUTO, *op.names)))
    return None if name == AUTO else _cannot_be_used(op, where, [("", _named(each, name)) for each in there])


def _cannot_be_used(op: ParallelOp, where: str, named: Sequence[tuple[str, Strategy]]) -> Problem | None:
    """Returns the mistake of naming a strategy that can run at none of its sites. named: how the message begins for a
    site, and the strategy there."""
    if any(each.can_run for _, each in named):
        return None
    why = "; ".join(dict.fromkeys(f"{site}{each.why_not}" for site, each in named))
    instead = next((each.refusal.instead for _, each in named if each.refusal and each.refusal.instead), op.fallback)
    what = f"'{named[0][1].name}' cannot be used: {why}"
    return Problem(where, what, f"set parallel.{op.kind}=auto, or {instead}")


def _named(strategies: Sequence[Strategy], name: str) -> Strategy:
    return next(each for each in strategies if each.name == name)


def choose_strategy(op: ParallelOp, site: OpSite, strategies: Sequence[Strategy], declared: str) -> OpPlan:
    """Settles one site. declared: AUTO, or the name of a strategy; where that is refused, the fallback runs."""
    if declared == AUTO:
        chosen, reason = _choose_by_cost(strategies)
    else:
        chosen = _named(strategies, declared)
        reason = f"parallel.{op.kind}={declared}" if chosen.can_run else chosen.why_not or ""
        chosen = chosen if chosen.can_run else _named(strategies, op.fallback)
    return OpPlan(op, site, chosen, tuple(s for s in strategies if s is not chosen), reason, is_auto=declared == AUTO)


def _choose_by_cost(strategies: Sequence[Strategy]) -> tuple[Strategy, str]:
    """Returns the cheapest of those that may run, where the costs of all are known, else the first of them; and the
    reason."""
    open_ones = [each for each in strategies if each.refusal is None]
    units = {each.cost.unit if each.cost else None for each in open_ones}
    if len(open_ones) > 1 and len(units) == 1 and None not in units:
        chosen = min(open_ones, key=lambda each: each.cost.value if each.cost else 0.0)
        return chosen, chosen.reason
    chosen = open_ones[0]
    first = strategies[0]
    return chosen, replace(first.refusal, loss="").sentence(first.name) if first.refusal else chosen.reason
