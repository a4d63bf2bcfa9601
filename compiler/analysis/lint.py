"""Finds what the compiled program does that the plan did not ask for, by comparing the two.

unplanned-collective        a collective that no rule of the plan causes
gradient-not-scattered      an all-reduce where the plan has a reduce-scatter: twice the bytes
wide-collective             float32 is transferred where the plan has a narrower type
repeated-gather             a value that is the same for all microbatches is gathered once for each
OPERATION-fallback          the strategy that a user would expect was refused: attention without the kernel
gathered-whole              the compiler itself reports that it gathers a whole array
held-whole                  an array that a rule splits is whole in memory throughout a loop that does not need it
too-exposed                 compute waits longer for communication and for the host than `overlap.max_exposed` allows
too-much-bubble             stages of a pipeline wait longer for each other than `pipeline.max_bubble` allows

Findings with the same text at several places become one: "9 places: a; b; c and 6 more".
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..core.float_types import NARROW
from ..core.format import human_names, human_seconds, human_share
from ..core.known import Unknown, first_unknown
from ..core.partition_spec import Axes
from ..core.traffic import HOST_COPIES, CollectiveKind
from ..estimate.communication import PlannedCollective
from ..parallel.operation import OpPlan
from ..parallel.pipeline_plan import PipelinePlan
from ..plan import Plan
from ..schema import FALLBACK, CollectiveReport, Finding, StepReport, by_exposed, total
from ..sharding.rules import ArrayPlan
from ..sharding.sharding import accumulated_layouts
from ..spec.sharding_spec import ShardingRules
from ..target.compiler_options import hidden_kinds, presets_for
from ..target.mesh import MeshPlan
from ..target.target import TargetPlan
from ..xla.aot import REMATERIALIZATION
from .program_memory import HeldArray
from .program_text import LEAST_BYTES, NUM_PLACES
from .schedule_analysis import Match

TOO_EXPOSED, TOO_MUCH_BUBBLE = "too-exposed", "too-much-bubble"
NUM_WORST = 3  # collectives that TOO_EXPOSED names

_SIZE = re.compile(r"([\d,.]+) MiB")
_GATHERED = re.compile(r"from sharding (?P<before>.+) to (?P<after>.+) efficiently for HLO operation "
                       r"(?P<name>%?\S+) = (?P<type>\w+\[[\d,]*\])(?:.*?op_name=\"(?P<op_name>[^\"]+)\")?")  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """One piece of advice. text: the action, with its override. is_followed: returns whether a plan already does it."""

    text: str
    is_followed: Callable[[Plan], bool]


SPLIT_THE_GROUP = Advice("split the group: sharding=hsdp", lambda plan: plan.mesh.sizes["replica"] > 1)
SPLIT_OVER_TENSOR = Advice("split it more: sharding=fsdp_tensor", lambda plan: plan.mesh.sizes["tensor"] > 1)
WIDER_TENSOR = Advice("split it more: a larger mesh.tensor", lambda plan: plan.mesh.sizes["tensor"] == 1)
HEAD_IN_CHUNKS = Advice(
    "cut the vocabulary: parallel.lm_head=vocab_chunks",
    lambda plan: any(each.chosen.weights == "chunked" for each in plan.operations),
)
MORE_TOKENS = "give each device more tokens with a larger global_batch_size: this transfer takes no longer then"
FULL_REMAT = Advice("remat=full", lambda plan: plan.spec.remat.policy == "full")


def with_preset_for(target: TargetPlan, kind: CollectiveKind) -> Advice | None:
    """Returns the advice to use the flag preset of the target that runs collectives of weights of this kind beside
    compute; None if there is none."""
    tried = ((name, one) for name, one in presets_for(target).items() if "weights" in one.tried_for)
    name = next((name for name, one in tried if kind in one.hides), None)
    if name is None:
        return None
    return Advice(
        f"set overlap.flag_presets=[{name}], which keeps {kind}s of most shapes as they are",
        lambda plan: kind in hidden_kinds(plan.spec.overlap.flag_presets, plan.spec, plan.target),
    )


def reduced_in_bfloat16(collectives: Sequence[CollectiveReport]) -> Advice:
    """Returns the advice to reduce gradients in bfloat16, with the exposed time that half the bytes would save at most.
    collectives: the collectives of the compiled program."""
    wide = [each for each in collectives if each.dtype == "f32" and each.kind in ("all-reduce", "reduce-scatter")]
    exposed = total(each.exposed_seconds for each in wide)
    saved = f", and up to {human_seconds(exposed / 2)} a step" if exposed else ""
    return Advice(
        f"reduce gradients in bfloat16, which saves half the bytes{saved}: precision.gradient_reduction=bfloat16",
        lambda plan: plan.spec.precision.compute != "bfloat16" or plan.spec.precision.gradient_reduction != "float32",
    )


def unfollowed(plan: Plan, *advice: Advice | str) -> str:
    """Returns the advice that is not followed yet, joined by "or". A plain text is always included."""
    return ", or ".join(
        each if isinstance(each, str) else each.text
        for each in advice
        if isinstance(each, str) or not each.is_followed(plan)
    )


def lint(
    plan: Plan,
    collectives: Sequence[CollectiveReport],
    matches: Mapping[str, Sequence[Match]],
    planned: Sequence[PlannedCollective],
    notes: Sequence[str],
    *,
    held: Sequence[HeldArray] = (),
) -> tuple[Finding, ...]:
    """Returns all findings, the most costly first. matches: for each collective, the planned ones of its size. notes:
    the compiler's messages about arrays that it gathers whole. held: weights and gradients that live throughout a
    loop."""
    between = [each for each in collectives if each.kind not in HOST_COPIES]
    large = [each for each in between if each.bytes // each.count >= LEAST_BYTES]
    narrower = reduced_in_bfloat16(large)
    found = [
        finding
        for each in large
        for finding in _of_collective(plan, each, matches.get(each.name, ()), planned, narrower)
    ]
    others = (*_missed(plan.operations), *map(_gathered_whole, notes), *_held_whole(plan, held))
    merged = _merged([*found, *(Costly(0, finding) for finding in others)])
    return tuple(each.finding for each in sorted(merged, key=lambda each: -each.cost))


def find_gathered_whole(notes: Sequence[str]) -> tuple[Finding, ...]:
    """Returns findings for these messages of a compiler. A program that runs at once has no other findings."""
    return tuple(each.finding for each in _merged([Costly(0, finding) for finding in map(_gathered_whole, notes)]))


@dataclass(frozen=True)
class Costly:
    """A finding with its cost: the bytes that need not be transferred."""

    cost: int
    finding: Finding


def _merged(found: Sequence[Costly]) -> list[Costly]:
    """Returns the findings, merging those that differ only in place and size and adding their costs."""
    alike: dict[Finding, list[Costly]] = {}
    for each in found:
        without = {"where": "", "what": _SIZE.sub("", each.finding.what)}
        alike.setdefault(each.finding.model_copy(update=without), []).append(each)
    return [
        replace(group[0], cost=sum(each.cost for each in group), finding=_at_all_places(group))
        for group in alike.values()
    ]


def _at_all_places(group: Sequence[Costly]) -> Finding:
    first = group[0].finding
    if len(group) == 1:
        return first

    def mebibytes(what: str) -> float:
        size = _SIZE.search(what)
        return float(size[1].replace(",", "")) if size else 0.0

    dearest = sorted(group, key=lambda each: (-each.cost, each.finding.where))  # independent of the compiler's order
    places = list(dict.fromkeys(each.finding.where for each in dearest))
    where = f"{len(group)} places: {human_names(places, NUM_PLACES, between='; ')}"
    what = max((each.finding.what for each in group), key=mebibytes)
    if len({each.finding.what for each in group}) > 1:
        what = _SIZE.sub(r"up to \g<0>", what)
    return first.model_copy(update={"where": where, "what": what})


def _of_collective(
    plan: Plan, each: CollectiveReport, matches: Sequence[Match], planned: Sequence[PlannedCollective], narrower: Advice
) -> list[Costly]:
    alike = [candidate for match in matches for candidate in match.candidates]
    scattered = [candidate for candidate in alike if candidate.kind == "reduce-scatter"]
    if each.kind == "all-reduce" and scattered:
        what = f"an all-reduce of {_size(each)} where the plan has reduce-scatters: half of the traffic is redundant"
        rules = dict.fromkeys(p.rule for p in scattered if p.rule)
        in_parts = [HEAD_IN_CHUNKS] if all(_is_of_head(p.origin.name) for p in scattered) else []
        preset = with_preset_for(plan.target, "reduce-scatter")
        fix = unfollowed(plan, *in_parts, *([preset] if preset else []), narrower, SPLIT_THE_GROUP) or MORE_TOKENS
        where = ", ".join((each.source, *rules))
        return [_costly(each, each.bytes // 2, "gradient-not-scattered", what, where, fix)]
    match = _closest(each, planned) or next(iter(alike), None)
    if match is None:
        return [_unplanned(plan.spec.sharding, each)]
    findings, it = [], f"{_a(each.kind)} of {_size(each)}"
    if each.dtype == "f32" and (narrow := NARROW.get(match.dtype)):
        what, fix = f"{it} in f32 where the plan has {narrow}", "report it: the step casts before it"
        findings.append(_costly(each, each.bytes // 2, "wide-collective", what, each.source, fix))
    number, is_larger = plan.spec.num_microbatches, each.bytes // each.count >= match.bytes_each
    if each.kind == "all-gather" and number > 1 and each.count > match.count and is_larger:
        what = f"{it} runs {each.count} times, once for each of {number} microbatches; {match.count} would do"
        cost = each.bytes * (each.count - match.count) // each.count
        larger = Advice("use remat=full with larger microbatches", FULL_REMAT.is_followed)
        fix = unfollowed(plan, "lower num_microbatches", larger)
        findings.append(_costly(each, cost, "repeated-gather", what, each.source, fix))
    return findings


def _closest(each: CollectiveReport, planned: Sequence[PlannedCollective]) -> PlannedCollective | None:
    """Returns the planned collective of this kind, or of a kind that it replaces, over these axes, with the closest
    size. None if all of them together are smaller even in a type twice as wide."""
    # A collective matmul replaces a gather or a scatter by permutes.
    kinds = (each.kind, "all-gather", "reduce-scatter") if each.kind == "collective-permute" else (each.kind,)
    alike = [p for p in planned if p.kind in kinds and set(p.mesh_axes) == set(each.mesh_axes)]
    if each.bytes // each.count > 2 * sum(p.bytes_each for p in alike):
        return None
    if each.dtype == "f32":  # a ring sends gradients in float32 beside keys and values
        alike = [p for p in alike if p.dtype == "float32" and p.origin.name == each.origin.name] or alike
    return min(alike, key=lambda p: abs(p.bytes - each.bytes), default=None)


def _unplanned(declared: ShardingRules, each: CollectiveReport) -> Costly:
    over = ", ".join(each.mesh_axes) or "all devices"
    what = f"{_a(each.kind)} of {_size(each)} over {over} that the plan does not have"
    rules = [
        f"sharding.{table}[{index}]"
        for table in ("parameters", "activations")
        for index, rule in enumerate(getattr(declared, table))
        if set(rule.mesh) & set(each.mesh_axes)
    ]
    by = f"; rules over these axes: {', '.join(rules)}" if rules else ""
    fix = "name the activation at its origin, so that a rule can lay it out, or change one of these rules"
    return _costly(each, each.bytes, "unplanned-collective", what, f"{each.source}{by}", fix)


def _missed(operations: Sequence[OpPlan]) -> list[Finding]:
    """Returns findings for strategies that the plan preferred but had to refuse at a cost."""
    found = [
        Finding(
            rule=f"{each.op.kind}{FALLBACK}",
            severity="warning",
            what=missed,
            where=f"parallel.{each.op.kind}",
            fix=f"change what it names, or set parallel.{each.op.kind}={each.chosen.name} if this is intended",
        )
        for each in operations
        if (missed := each.missed)
    ]
    return list(dict.fromkeys(found))  # sites of several pieces


def _gathered_whole(note: str) -> Finding:
    """Returns the finding for a message of XLA's partitioner, without its prefix of time and thread."""
    what, where = note[max(0, note.find(REMATERIALIZATION)) :], "compiler"
    if match := _GATHERED.search(note):
        what = f"an array of {match['type']} is gathered whole: from sharding {match['before']} to {match['after']}"
        where = f"{match['op_name'] or 'made by the compiler'} ({match['name'].lstrip('%')})"
    fix = "give the activations around it a rule over the same mesh axes"
    return Finding(rule="gathered-whole", severity="warning", what=what, where=where, fix=fix)


def _held_whole(plan: Plan, held: Sequence[HeldArray]) -> list[Finding]:
    """Returns a finding for each parameter, the largest first."""
    gradients = accumulated_layouts(plan.spec, plan.sharding)
    found: dict[tuple[str, str], tuple[int, Finding]] = {}
    for each in held:
        layouts = gradients if each.kind == "gradients" else plan.sharding.parameters
        array = _whole_of(each, layouts, plan.roles.tokens, plan.mesh)
        if array is None or each.num_bytes < plan.spec.sharding.replicated_bytes_threshold:
            continue
        what = f"{'the gradient of ' * (each.kind == 'gradients')}{array.array.path} is whole in memory"
        size = f"{each.num_bytes / 2**20:,.1f} MiB on every device"
        severity: Literal["warning", "note"] = "warning" if each.over_microbatches else "note"
        if each.over_microbatches:
            what += f" for all microbatches: {size}"
            fewer = "num_microbatches=1 with fewer sequences"
            fix = unfollowed(plan, fewer, FULL_REMAT, SPLIT_OVER_TENSOR, WIDER_TENSOR)
        elif each.kind == "gradients" or not each.over_others:
            continue  # accumulated chunk by chunk in its own loop, or used in it
        else:
            what += f" throughout a loop that does not read it: {size}"
            in_parts = [HEAD_IN_CHUNKS] if _is_of_head(array.array.path) else []
            advice = unfollowed(plan, *in_parts, SPLIT_OVER_TENSOR, WIDER_TENSOR)
            fix = f"none is needed if the step fits; otherwise {advice}"
        where = f"{array.table}: {array.reason} ({each.name})"
        finding = Finding(rule="held-whole", severity=severity, what=what, where=where, fix=fix)
        key = (array.array.path, each.kind)
        found[key] = max(found.get(key, (0, finding)), (each.num_bytes, finding), key=lambda one: one[0])
    return [finding for _, finding in sorted(found.values(), key=lambda one: -one[0])]


def _is_of_head(path: str) -> bool:
    return path.split("/")[0] == "head"


def _whole_of(each: HeldArray, layouts: Sequence[ArrayPlan], tokens: Axes, mesh: MeshPlan) -> ArrayPlan | None:
    """Returns the planned array of which this is the whole, if a rule splits it over the axes of tokens. It is matched
    by name, or by sizes if the compiler dropped the name, preferably in the same order."""
    moved = {path for name in each.names for path in name.parameters([array.array.path for array in layouts])}
    named = [array for array in layouts if array.array.path in moved]
    if not named:
        named = [array for array in layouts if sorted(array.array.shape) == sorted(each.shape)]
        named.sort(key=lambda array: array.array.shape != each.shape)
    for array in named:
        axes = {axis for dimension in array.dimensions for axis in dimension.axes}
        over_tokens = axes & set(tokens)
        num_others = mesh.num_shards(tuple(axes - over_tokens))
        if over_tokens and math.prod(each.shape) == math.prod(array.array.shape) // num_others:
            return array
    return None


def _costly(each: CollectiveReport, cost: int, rule: str, what: str, where: str, fix: str) -> Costly:
    place = f"{where} ({each.name}, {each.where})"
    return Costly(cost, Finding(rule=rule, severity="warning", what=what, where=place, fix=fix))


def _size(each: CollectiveReport) -> str:
    return f"{each.bytes / each.count / 2**20:,.1f} MiB"


def _a(kind: str) -> str:
    """Returns a kind with its article: 'an all-gather', 'a reduce-scatter'."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def find_too_exposed(
    plan: Plan, step: StepReport, collectives: Sequence[CollectiveReport], *, is_searched: bool = False
) -> Finding | None:
    """Returns the finding that more of the step is exposed than `overlap.max_exposed` allows; None if there is no
    limit, or the schedule meets it. An unknown exposure does not meet it. is_searched: whether the step is the best of
    `overlap.search`."""
    limit, share = plan.spec.overlap.max_exposed, step.exposed_fraction
    if limit is None:
        return None
    if isinstance(share, Unknown) or first_unknown(each.exposed_seconds for each in collectives) is not None:
        what = f"overlap.max_exposed allows {human_share(limit)} of the step, and the exposed time is not known"
        fix = "see the reason in `unknown` of report.json; choose another target, or set overlap.max_exposed=null"
        return Finding(rule=TOO_EXPOSED, severity="warning", what=what, where="compiled.exposed_fraction", fix=fix)
    if share <= limit:
        return None
    copies = [each for each in collectives if each.kind in HOST_COPIES]
    between = [each for each in collectives if each.kind not in HOST_COPIES]
    compute, alone = step.compute_seconds or 0.0, total(each.alone_seconds for each in between)
    of_host, seconds = step.exposed_host_seconds, step.exposed_seconds or 0.0
    # Exposed copies grow with the batch, as compute does: collectives may take what they leave of the limit.
    batch = least_batch(plan, compute - (1 - limit) * of_host, between, limit)
    if share * of_host > limit * seconds or of_host > seconds - of_host:
        fix = f"copies to and from the host take {human_seconds(total(each.alone_seconds for each in copies) or 0.0)} "
        fix += "by themselves: keep more on the device, or compute it again (remat.names, remat=by_name)"
    elif batch is None:
        fix = "no schedule hides it at any batch; shard over fewer devices, or along faster links"
    elif batch > plan.spec.global_batch_size:
        fix = f"no schedule hides it; global_batch_size={batch} could"
    elif is_searched:
        fix = "a better schedule could hide it; try a larger overlap.search.max_candidates, or other compiler_options"
    else:
        fix = "a better schedule could hide it; try overlap=auto"
    apart = ""
    if of_host:
        apart = f" ({human_seconds(seconds - of_host)} of communication, {human_seconds(of_host)} of host copies)"
    worst = by_exposed(collectives)[:NUM_WORST]
    named = [f"{each.kind} of {each.source}, {human_seconds(each.exposed_seconds or 0.0)}" for each in worst]
    return Finding(
        rule=TOO_EXPOSED,
        severity="warning",
        what=f"{human_share(share)} of the step is exposed{apart}, and overlap.max_exposed allows {human_share(limit)}",
        where="; ".join(named),
        fix=f"communication takes {human_seconds(alone or 0.0)} by itself and compute {human_seconds(compute)}: {fix}",
    )


def least_batch(
    plan: Plan, compute_seconds: float, collectives: Sequence[CollectiveReport], limit: float
) -> int | None:
    """Returns the smallest global batch at which compute could hide the busiest link; None if there is none.

    Collectives of weights and gradients do not depend on the batch; compute and the collectives of activations grow
    with it. One whose size alone says what it is counts to the weights if it may be one of theirs.
    """
    paths = {array.array.path for array in plan.sharding.parameters}
    factors = [1.0]
    for kind in dict.fromkeys(each.link for each in collectives):
        on_link = [each for each in collectives if each.link == kind]
        of_weights = [each for each in on_link if each.origin.parameter or paths & {*each.origin.others}]
        fixed = sum(each.alone_seconds or 0.0 for each in of_weights)
        growing = sum(each.alone_seconds or 0.0 for each in on_link) - fixed
        # fixed + f growing <= f compute + what may be exposed of the step, f compute / (1 - limit) long
        room = compute_seconds / (1 - limit) - growing
        if fixed and room <= 0:
            return None
        factors.append(fixed / room if fixed else 1.0)
    shards = plan.mesh.num_shards(plan.roles.tokens) * plan.spec.num_microbatches
    return math.ceil(max(factors) * plan.spec.global_batch_size / shards) * shards


def find_too_much_bubble(limit: float | None, pipeline: PipelinePlan | None, step: StepReport) -> Finding | None:
    """Returns the finding that stages wait longer than the limit, `pipeline.max_bubble`, allows; None without a limit
    or without stages, or if the schedule meets it. An unknown bubble does not meet it."""
    share = step.bubble_fraction
    if limit is None or pipeline is None:
        return None
    allowed = f"pipeline.max_bubble allows {human_share(limit)} of the step"
    where = "compiled.bubble_fraction"
    if isinstance(share, Unknown):
        fix = "see the reason in `unknown` of report.json; choose another target, or set pipeline.max_bubble=null"
        what = f"{allowed}, and the bubble is not known"
        return Finding(rule=TOO_MUCH_BUBBLE, severity="warning", what=what, where=where, fix=fix)
    if share <= limit:
        return None
    table = pipeline.table
    waits = human_seconds(step.bubble_seconds or 0.0)
    what = f"stages wait {human_share(share)} of the step for each other, {waits} of {table.name}, and {allowed}"
    fix = f"use more than num_microbatches={table.num_microbatches}, fewer stages, or another schedule: pipeline=zb_h1"
    if table.name.startswith(("zb", "dualpipe")):
        fix = f"use more than num_microbatches={table.num_microbatches}, or fewer stages"
    return Finding(rule=TOO_MUCH_BUBBLE, severity="warning", what=what, where=where, fix=fix)
