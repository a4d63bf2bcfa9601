"""Chooses in which type each site multiplies: a second choice beside its strategy, by the rules of `precision.matmuls`.

    [{match: layers/mlp/*, forward: fp8, gradients: fp8_e5m2}]  ->  mlp_up, mlp_gate and mlp_output in fp8

The first rule that matches a site's weight is the site's. Embedding and head, routers and adapters multiply as they
are, and a pattern that matches others passes over them. The matrices of experts are one site.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from jax.sharding import PartitionSpec

from meshloom.models.adapter import is_adapter

from ..core.errors import Problem, use_one_of
from ..core.partition_spec import Axes, keep_axes
from ..formats.operands import operand_formats
from ..sharding.arrays import Operand, OpSite, gradient_name
from ..spec.step_spec import MatmulPrecision
from ..spec.target_names import kinds_that_multiply_in
from .block_scaled import block_problems
from .operation import OpInputs
from .quantized import Arithmetic, SitePrecision

WHERE = "precision.matmuls"
HEAD, UNNAMED = "head", "it is of the head, and no rule names that"
MATMUL, IN_GROUPS = "matmul", "experts multiply in groups, whose scales are not of blocks"


@dataclass(frozen=True)
class Multiplied:
    """A site, and the weights that it multiplies with. why_not: why the target cannot do so in few bits; None: it
    can."""

    site: OpSite
    weights: tuple[Operand, ...]
    why_not: str | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """Returns the paths of the parameters that are its weights."""
        return tuple(path for weight in self.weights for path in weight.parameters)


def plan_arithmetic(sites: Iterable[Multiplied], inputs: OpInputs) -> tuple[dict[OpSite, SitePrecision], list[Problem]]:
    """Returns the types of each site, and the mistakes in the rules; no site where there are no rules."""
    sites, rules = tuple(sites), inputs.spec.precision.matmuls
    left_out = {each.site: _left_out(each, rules, inputs) for each in sites}
    found = {each.site: _rule_of(each, rules) for each in sites}
    problems = [
        problem
        for index, rule in enumerate(rules)
        for problem in (
            *_wrong_types(index, rule, inputs),
            *_unused(index, rule, sites, left_out, found, inputs),
            *_gathered_head(index, rule, sites),
            *_delayed(index, rule, sites, inputs),
        )
    ]
    problems = problems or _in_blocks(sites, left_out, found, inputs)
    if problems or not rules:
        return {}, problems
    every = ((each.site, found[each.site], left_out[each.site]) for each in sites)
    return {site: _precision(site, index, rules, why, inputs) for site, index, why in every}, []


def _precision(
    site: OpSite, index: int | None, rules: tuple[MatmulPrecision, ...], left_out: str | None, inputs: OpInputs
) -> SitePrecision:
    if left_out or index is None:
        return SitePrecision(None, left_out or "no rule matches it")
    rule, formats, reason = rules[index], operand_formats(), f"{WHERE}[{index}]"
    gather = formats[rule.gather] if rule.gather else None
    if rule.forward is None:
        return SitePrecision(None, reason, gather)
    if formats[rule.forward].blocks and site.kind != MATMUL:
        return SitePrecision(None, IN_GROUPS)
    x = site.operands[0].activation
    arithmetic = Arithmetic(
        forward=formats[rule.forward],
        gradients=formats[rule.gradients] if rule.gradients else None,
        rounds_at_random=rule.rounding == "stochastic",
        emulated=inputs.spec.precision.emulate,
        tokens=inputs.roles.tokens,
        columns=_columns_by_hand(site, inputs),
        result_spec=_spec_of(site.name, inputs),
        gradient_spec=_spec_of(gradient_name(x), inputs) or _spec_of(x, inputs) if x else None,
        history=rule.history if site.kind == MATMUL else None,
    )
    return SitePrecision(arithmetic, reason, gather)


def _columns_by_hand(site: OpSite, inputs: OpInputs) -> Axes:
    """Returns the mesh axes over which each device multiplies with its part of a weight: the stages that share a
    head."""
    paths, stage = site.operands[1].parameters if site.piece == HEAD else (), inputs.roles.stage
    own = (plan for plan in inputs.sharding.parameters if plan.array.path in paths)
    axes = (axis for plan in own for dimension in plan.dimensions for axis in dimension.axes if axis in stage)
    return tuple(dict.fromkeys(axes))


def _spec_of(activation: str, inputs: OpInputs) -> PartitionSpec | None:
    """Returns the layout of an activation over the partitioner's axes; None where it has none."""
    planned, axes = inputs.activation(activation), inputs.roles.partitioner
    return keep_axes(planned.spec, axes) if planned and axes else None


def _rule_of(each: Multiplied, rules: tuple[MatmulPrecision, ...]) -> int | None:
    """Returns the index of the first rule that matches a site."""
    return next((index for index, rule in enumerate(rules) if _matches(rule, each)), None)


def _matches(rule: MatmulPrecision, each: Multiplied) -> bool:
    """Returns True where a rule matches all weights of a site, which multiply in one type."""
    return len(_matched(rule, each)) == len(each.weights)


def _matched(rule: MatmulPrecision, each: Multiplied) -> list[Operand]:
    """Returns the weights of a site that a rule matches. Those of the head are matched by a pattern that begins with
    its name alone, so that none for layers takes it along."""
    if each.site.piece == HEAD and not (rule.match or "").startswith(HEAD):
        return []
    if rule.match is None:
        return list(each.weights)
    return [one for one in each.weights if any(fnmatchcase(path, rule.match) for path in one.parameters)]


def _left_out(each: Multiplied, rules: tuple[MatmulPrecision, ...], inputs: OpInputs) -> str | None:
    """Returns why a site multiplies as its operands are, whatever rules say; None where rules decide."""
    if each.site.piece == "embed":
        return "it is of the embedding"
    if not each.paths:
        return "its weight is computed from parameters"
    if each.site.piece == HEAD and not all(path.startswith(f"{HEAD}/") for path in each.paths):
        return "it is of the head, and the embedding has its weights"
    if each.site.piece == HEAD and _rule_of(each, rules) is None:
        return UNNAMED
    if any(is_adapter(path) for path in each.paths):
        return "it is of an adapter"
    if any(path in inputs.model.float32 for path in each.paths) or dict(each.site.options).get("precision"):
        return "it is computed in float32"
    return None if inputs.spec.precision.emulate else each.why_not


def _wrong_types(index: int, rule: MatmulPrecision, inputs: OpInputs) -> Iterator[Problem]:
    """Yields the mistakes in the types of a rule: unknown ones, and those that no product or no target has."""
    formats, where = operand_formats(), f"{WHERE}[{index}]"
    names = {"forward": rule.forward, "gradients": rule.gradients, "gather": rule.gather}
    used = {key: name for key, name in names.items() if name is not None}
    unknown = {key: name for key, name in used.items() if name not in formats}
    for key, name in unknown.items():
        yield Problem(f"{where}.{key}", f"'{name}' is not a type of operands", use_one_of(name, formats))
    if (gather := formats.get(rule.gather or "")) and gather.blocks:
        whole = [name for name, each in formats.items() if not each.blocks]
        what = f"'{rule.gather}' has a scale for each block, and weights are gathered with scales of whole columns"
        fix = "set gather: null" if rule.forward == rule.gather else f"{use_one_of(rule.gather, whole)}, or null"
        yield Problem(f"{where}.gather", what, fix)
    if unknown or rule.forward is None:
        return
    types = {key: formats[name].arithmetic for key, name in used.items()}
    if len(set(types.values())) > 1:
        what = f"'{rule.gradients}' cannot be multiplied with '{rule.forward}': {' and '.join(types.values())}"
        alike = [name for name, each in formats.items() if each.arithmetic == types["forward"]]
        yield Problem(f"{where}.gradients", what, f"{use_one_of(rule.gradients, alike)}, or null")
    elif rule.gradients and formats[rule.gradients].blocks != formats[rule.forward].blocks:
        are_both = formats[rule.gradients].blocks and formats[rule.forward].blocks
        why = "their scales are of other blocks" if are_both else "one of them has a scale for each block"
        what = f"'{rule.gradients}' cannot be multiplied with '{rule.forward}': {why}"
        yield Problem(f"{where}.gradients", what, f"set gradients: {rule.forward}, or null")
    elif rule.rounding == "stochastic" and rule.gradients and not formats[rule.gradients].can_round_at_random:
        what = f"'{rule.gradients}' is rounded to the nearest alone"
        yield Problem(f"{where}.rounding", what, "set rounding: nearest, or choose int8")
    real, target = types["forward"], inputs.target
    has_blocks = formats[rule.forward].blocks is not None  # `block_problems` asks the target
    if not has_blocks and not inputs.spec.precision.emulate and real not in target.real_types:
        yield _not_real(f"{where}.forward", rule.forward, real, target.name)


def _gathered_head(index: int, rule: MatmulPrecision, sites: Iterable[Multiplied]) -> Iterator[Problem]:
    """Yields the mistake of a rule that gathers the weights of the head, of which chunks are gathered, in few bits."""
    if rule.gather and any(each.site.piece == HEAD and _matches(rule, each) for each in sites):
        what = f"'{rule.match}' is of the head, whose weights are gathered in the compute type"
        yield Problem(f"{WHERE}[{index}].gather", what, "set gather: null")


def _delayed(index: int, rule: MatmulPrecision, sites: Iterable[Multiplied], inputs: OpInputs) -> Iterator[Problem]:
    """Yields why scales of a rule cannot come from earlier steps."""
    if rule.history is None:
        return
    spec, formats = inputs.spec, operand_formats()
    used = (formats[name] for name in (rule.forward, rule.gradients) if name and name in formats)
    own = [each.site for each in sites if each.site.kind == MATMUL and _matches(rule, each)]
    several = next((site.name for site in own if len(site.operands[1].parameters) > 1), None)
    refusals = {
        "the head has scales from the magnitudes now": any(site.piece == HEAD for site in own),
        f"'{several}' multiplies with several weights in a layer": several is not None,
        "its types have more scales than one for a tensor": any(each.scales != "tensor" for each in used),
        "stages hand on no magnitudes": bool(inputs.roles.stage),
        "overlap.layers.prefetch hands on no magnitudes": bool(spec.overlap.layers.prefetch),
        "the parts of overlap.layers.batch_split have magnitudes each": spec.overlap.layers.batch_split > 1,
        "on_nonfinite=replay repeats a step with scales from the magnitudes now": spec.on_nonfinite == "replay",
    }
    for why in (why for why, is_so in refusals.items() if is_so):
        yield Problem(f"{WHERE}[{index}].history", f"is {rule.history}, and {why}", "set history: null")


def _in_blocks(
    sites: Iterable[Multiplied], left_out: Mapping[OpSite, str | None], found: Mapping[OpSite, int | None],
    inputs: OpInputs,
) -> list[Problem]:  # fmt: skip
    """Returns the mistakes of rules that multiply in blocks: the first of each rule."""
    rules, problems = inputs.spec.precision.matmuls, dict[int, Problem]()
    for each in sites:
        index = found[each.site]
        format = None if index is None else operand_formats().get(rules[index].forward or "")
        if index is None or left_out[each.site] or format is None or format.blocks is None or index in problems:
            continue
        if each.site.piece == HEAD:
            what = f"'{rules[index].match}' is of the head, whose chunks of tokens and vocabulary may cut blocks"
            whole = [name for name, one in operand_formats().items() if not one.blocks]
            problems[index] = Problem(f"{WHERE}[{index}].forward", what, use_one_of(format.name, whole))
        elif each.site.kind == MATMUL:
            for problem in block_problems(f"{WHERE}[{index}].forward", each.site, format, inputs):
                problems[index] = problem
        elif rules[index].match is not None:
            what = f"'{rules[index].match}' matches '{each.paths[0]}', and {IN_GROUPS}"
            problems[index] = Problem(f"{WHERE}[{index}].forward", what, "choose fp8 for it, or a narrower pattern")
    return list(problems.values())


def _not_real(where: str, name: str, real: str, target: str) -> Problem:
    """Returns the mistake of a type that a target does not multiply in."""
    having = kinds_that_multiply_in(real)
    what = f"the compiler for {target} makes no matmul faster in {real}, the type of '{name}'"
    chips = f"choose a target of {', '.join(having)}" if having else "choose another type"
    return Problem(where, what, f"{chips}, or set precision.emulate=true, which rounds as {name} does and is slower")


def _unused(
    index: int, rule: MatmulPrecision, sites: Iterable[Multiplied], left_out: Mapping[OpSite, str | None],
    found: Mapping[OpSite, int | None], inputs: OpInputs,
) -> Iterator[Problem]:  # fmt: skip
    """Yields the mistake of a rule that no site follows."""
    where, can = f"{WHERE}[{index}].match", [each for each in sites if left_out[each.site] is None]
    matching = [each for each in can if _matches(rule, each)]
    others = [each for each in sites if left_out[each.site] is not None and _matches(rule, each)]
    if any(found[each.site] == index for each in matching) or (others and rule.match and rule.forward is None):
        return
    options = [path for each in sites if left_out[each.site] in (None, UNNAMED) for path in each.paths]
    pattern = "all matmuls of layers" if rule.match is None else f"'{rule.match}'"
    tables = [x.path for x in inputs.arrays.parameters if x.path.startswith("embed/")]
    if matching:
        yield Problem(where, f"rules before it match all that {pattern} matches", "give the narrower rule first")
    elif not can:
        yield Problem(where, "no matmul of a layer reads a parameter", "let the model multiply by context.matmul")
    elif others:
        what = f"{pattern} matches '{others[0].paths[0]}', which is left out: {left_out[others[0].site]}"
        yield Problem(where, what, use_one_of(rule.match, options))
    elif parts := [each for each in can if _matched(rule, each)]:
        what = f"{pattern} matches some of {', '.join(parts[0].paths)}, which multiply in one type"
        yield Problem(where, what, "match all of them, or none")
    elif rows := [path for path in tables if fnmatchcase(path, rule.match or "")]:
        what = f"{pattern} matches '{rows[0]}', of which rows are looked up"
        yield Problem(where, what, use_one_of(rule.match, options))
    else:
        yield Problem(where, f"no weight of a matmul matches {pattern}", use_one_of(rule.match, options))
