"""Checks XLA's options, named one by one or in presets, with the installed compiler, and answers what follows from the
compiler's traits."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from ..core.config_types import CompilerOption
from ..core.errors import ConfigError, Problem, raise_if_any, use_one_of
from ..core.traffic import CollectiveKind
from ..spec.cost_model import cost_model
from ..spec.flag_presets import FlagPreset, Options, hidden_by, matmul_share_by
from ..spec.overlap_spec import AUTO, OverlapSpec
from ..spec.plan_spec import PlanSpec
from .target import TargetPlan, faster_matmuls

_NO_SUCH_OPTION = re.compile(r"No such compile option: '(?P<name>[^']*)'")
_WRONG_VALUE = re.compile(r"setting option (?P<name>\w+), (?P<what>.*?)\.?$", re.M)


def presets_for(target: TargetPlan) -> dict[str, FlagPreset]:
    """Returns the presets that change programs for this target."""
    return {name: one for name, one in target.flag_presets.items() if one.is_offered}


def default_presets(target: TargetPlan, *, has_experts: bool, num_parts: int) -> tuple[str, ...]:
    """Returns the presets that `auto` stands for on this target. has_experts: whether the model does. num_parts: of the
    batch in a layer. Within a node neither needs any."""
    is_across = _spans_nodes(target)
    return tuple(
        name
        for name, one in presets_for(target).items()
        if one.is_default
        or (is_across and has_experts and one.is_default_for_experts)
        or (is_across and num_parts > 1 and one.is_default_for_parts)
    )


def _spans_nodes(target: TargetPlan) -> bool:
    return target.shape is not None and target.shape[0] > 1


def with_presets(spec: PlanSpec, target: TargetPlan, *, has_experts: bool) -> PlanSpec:
    """Returns the declaration with `auto` of overlap.flag_presets replaced by the default presets of the target. The
    key keeps its origin, since it still declares what was typed."""
    overlap = spec.overlap
    names = _without_auto(overlap.flag_presets, target, has_experts=has_experts, num_parts=overlap.layers.batch_split)
    return spec.settled(overlap=spec.overlap.model_copy(update={"flag_presets": names}))


def _without_auto(names: Sequence[str], target: TargetPlan, *, has_experts: bool, num_parts: int) -> tuple[str, ...]:
    defaults = default_presets(target, has_experts=has_experts, num_parts=num_parts)
    found = (defaults if name == AUTO else (name,) for name in names)
    return tuple(dict.fromkeys(name for several in found for name in several))


def describe_presets(overlap: OverlapSpec, target: TargetPlan, *, has_experts: bool) -> str | None:
    """Returns a line about the presets of a program and the defaults of its target; None if there are neither."""
    names = overlap.flag_presets
    defaults = default_presets(target, has_experts=has_experts, num_parts=overlap.layers.batch_split)
    if not defaults:
        return ", ".join(names) or None
    if tuple(names) == defaults:
        return f"{', '.join(names)}, the default for {target.name}; overlap.flag_presets=[] leaves it out"
    return f"{', '.join(names) or 'none'}; the default for {target.name} is {', '.join(defaults)}"


def inert_presets(names: Sequence[str], target: TargetPlan) -> tuple[Problem, ...]:
    """Returns a warning for each of these presets that does not change programs for this target."""
    return tuple(
        Problem(
            f"overlap.flag_presets[{index}]", f"'{name}' does nothing on {target.name}: {one.inert}", "leave it out"
        )
        for index, name in enumerate(names)
        if (one := target.flag_presets.get(name)) is not None and one.inert is not None
    )


def options_with(names: Sequence[str], spec: PlanSpec, target: TargetPlan) -> Options:
    """Returns the options of a program with these presets: theirs, then those that the declaration has by hand."""
    found = dict[str, CompilerOption]()
    for name in names:
        found |= target.flag_presets[name].flags or {}
    return found | spec.compiler_options


def hidden_kinds(names: Sequence[str], spec: PlanSpec, target: TargetPlan) -> frozenset[CollectiveKind]:
    """Returns the kinds of collectives that the compiler overlaps with compute, given these presets and the options
    that the declaration has by hand."""
    return hidden_by(options_with(names, spec, target), target.option_effects)


def kinds_from_matmuls(names: Sequence[str], spec: PlanSpec, target: TargetPlan) -> frozenset[CollectiveKind]:
    """Returns those of the hidden kinds of which chunks are sent from within matmuls: nothing else would hide them."""
    options = options_with(names, spec, target)
    effects = target.option_effects
    others = {name: replace(one, hides=()) if one.sends_from_matmuls else one for name, one in effects.items()}
    return hidden_by(options, effects) - hidden_by(options, others)


def with_options(target: TargetPlan, names: Sequence[str], by_hand: Options) -> TargetPlan:
    """Returns the target with the speed that the options of these presets and those by hand give its matmuls. Presets
    that do not exist are refused with the layout."""
    named = _without_auto(names, target, has_experts=False, num_parts=1)  # the others do not change matmuls
    known = (target.flag_presets[name] for name in named if name in target.flag_presets)
    options = dict(item for one in known for item in (one.flags or {}).items()) | dict(by_hand)
    return faster_matmuls(target, matmul_share_by(options, target.option_effects))


def assumed_weight_presets(spec: PlanSpec, target: TargetPlan) -> tuple[str, ...]:
    """Returns the declared presets, or the one that overlaps more kinds of collectives of weights with compute.

    One that begins them in the trip of a loop before may hide more, or hold so much more that it does not fit or that
    less is hidden (docs/overlap.md, "The memory that XLA plans for"): it is not assumed.
    """
    tried = [(name,) for name, one in presets_for(target).items() if "weights" in one.tried_for]
    return max([spec.overlap.flag_presets, *tried], key=lambda names: len(hidden_kinds(names, spec, target)))


def why_permutes_wait(target: TargetPlan) -> str | None:
    """Returns the reason why permutes do not overlap with matmuls; None if they do."""
    most = target.compiler.max_chips_async_permutes
    if not target.compiler.async_permutes:
        return f"the compiler for {target.name} does not overlap permutes with matmuls"
    if most is not None and target.num_chips > most:
        return f"the compiler for {target.name} does not overlap permutes with matmuls on more than {most} chips"
    return None


def exposed_with_parts(target: TargetPlan, *, in_turns: bool = True, at_once: int = 1) -> float | None:
    """Returns the share of tensor parallelism's collectives that is waited for with a split batch; None if nothing of
    one part runs beside the other. in_turns: the parts run in turns where the compiler keeps their order. at_once: how
    many collectives may be on their way."""
    if in_turns and (shares := target.compiler.exposed_in_turns) is not None:
        return shares.one_at_a_time if at_once == 1 and _spans_nodes(target) else shares.share
    return cost_model().exposed_beside_matmuls if why_permutes_wait(target) is None else None


def aborts_unrolled(split_axes: Sequence[str], target: TargetPlan) -> bool:
    """Returns True if the compiler would abort with several layers per iteration. split_axes: the mesh axes that split
    matmuls."""
    return bool(split_axes) and target.compiler.aborts_on_unroll


def plan_preset_options(names: Sequence[str], target: TargetPlan) -> Options:
    """Returns the options of these presets for this target; later presets take precedence. Raises ConfigError for
    presets that do not exist, or that have no options for the target."""
    choices, problems, found = presets_for(target), list[Problem](), dict[str, CompilerOption]()
    for index, name in enumerate(names):
        known = target.flag_presets.get(name)
        if known is not None and known.flags is not None:
            found |= known.flags
            continue
        what = f"'{name}' has no options for {target.name}" if known else f"there is no preset '{name}'"
        fix = use_one_of(name, list(choices)) if choices else "leave it out"
        problems.append(Problem(f"overlap.flag_presets[{index}]", what, fix))
    raise_if_any(problems)
    return found


def options_by_traits(spec: PlanSpec, target: TargetPlan, num_shards: int) -> Options:
    """Returns the options that the target's compiler needs in order to plan for all of the memory, to hide sums of
    gradients, and not to fail on the declaration. num_shards: the most into which a gradient is scattered."""
    precision, compiler = spec.precision, target.compiler
    is_narrow = precision.gradient_reduction != precision.gradients and spec.num_microbatches > 1
    sums = compiler.combined_sums
    return {
        **_memory_options(target),
        **({sums.option: sums.most_bytes // num_shards} if sums and num_shards > 1 else {}),
        **(compiler.narrow_reduction_options if is_narrow else {}),
    }


def _memory_options(target: TargetPlan) -> Options:
    """Returns the memory options of the target's compiler, which count from the whole memory of a chip, for as much of
    it as a device has: JAX may have taken less."""
    chip, limit = target.chip, target.hbm_bytes_per_device
    share = min(1.0, limit * chip.num_devices / chip.compiler_hbm_bytes) if chip and limit else 1.0
    return {name: int(value * share) for name, value in target.compiler.memory_options.items()}


def check_unroll(num_layers: int, split_axes: Sequence[str], target: TargetPlan) -> None:
    """Raises ConfigError if the compiler would abort the process. num_layers: layers per iteration. split_axes: the
    mesh axes that split matmuls."""
    if num_layers > 1 and aborts_unrolled(split_axes, target):
        what = f"the compiler for {target.name} aborts with {num_layers} layers an iteration if {', '.join(split_axes)}"
        raise_if_any([Problem("overlap.layers.unroll", f"{what} splits matmuls", "set overlap.layers.unroll=1")])


def refused_options(options: Options, device: Any) -> dict[str, Problem]:
    """Returns the options that this device's compiler refuses, each with its Problem, tried on an empty program. Raises
    ConfigError for options that are valid alone but refused in combination, or for this chip."""
    refused: dict[str, Problem] = {}
    left: dict[str, Any] = dict(options)
    nothing = jax.jit(lambda: 0, out_shardings=SingleDeviceSharding(device)).lower() if left else None
    while left and nothing is not None:
        try:
            nothing.compile(compiler_options=left)
            break
        except jax.errors.JaxRuntimeError as error:
            problem = option_problem(str(error), device.platform)
            name = problem.where.partition(".")[2] if problem else ""
            if problem is None or left.pop(name, None) is None:
                what = f"the compiler for {device.platform} refuses them: {str(error).splitlines()[0]}"
                fix = "leave out the option that it names, or set what it asks for"
                raise ConfigError([*refused.values(), Problem("compiler_options", what, fix)]) from error
            refused[name] = problem
    return refused


def check_compiler_options(options: Options, device: Any) -> None:
    """Raises ConfigError with every option that this device's compiler refuses."""
    raise_if_any(list(refused_options(options, device).values()))


def option_problem(said: str, platform: str) -> Problem | None:
    """Returns the Problem if an XLA error is about a compiler option; None for any other error."""
    if match := _NO_SUCH_OPTION.search(said):
        fix = "check the spelling; options change between versions of the compiler"
        return Problem(f"compiler_options.{match['name']}", f"the compiler for {platform} has no such option", fix)
    if match := _WRONG_VALUE.search(said):
        return Problem(f"compiler_options.{match['name']}", match["what"], "give a value of the option's type")
    return None
