"""The arithmetic of Meshloom's optimizers and schedules: the optax transformation of each config (configs.py).

The compiler does the rest for all optimizers (compiler/sharding/state.py): clipping by global norm, float32 arithmetic
and the layout of the state. Learning rates have a linear warm-up, then the decay of the schedule's kind.

Steps count from 0. Peak P, run of N steps, warm-up of W, final fraction f. The warm-up gives step n the rate
P (n + 1) / W, so that the first step trains, too, and its last step has the peak. So does the first step after it; the
last step of the run has the final rate P f. s = (n - W) / (N - 1 - W):

    constant  P
    cosine    P (f + (1 - f) (1 + cos(pi s)) / 2)
    linear    P (1 - (1 - f) s)
    wsd       P until the last D steps; in those, d = 1/D, 2/D, .. 1: P (1 - (1 - f) d), or sqrt(d) for d

If only one step follows the warm-up, cosine and linear give it the peak. If the decay of wsd begins right after the
warm-up (W + D = N), the last step of the warm-up alone has the peak, and without a warm-up no step.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from meshloom.models import LogicalAxes, Model, is_logical_axes

from ..core.float_types import MomentType
from .configs import (
    AdafactorConfig,
    AdamWConfig,
    ConstantSchedule,
    CosineSchedule,
    LibraryOptimizer,
    LibrarySchedule,
    LinearSchedule,
    LionConfig,
    MuonConfig,
    ScheduleConfig,
    SgdConfig,
    WsdSchedule,
)
from .contract import Setting
from .moments import moment_layouts, stored_in, stored_in_types


def learning_rates(schedule: ScheduleConfig, peak: float, num_steps: int) -> optax.Schedule:
    """Returns a function of the step to its learning rate; the first step is 0."""
    decay = schedule.decay(peak, max(num_steps - schedule.num_warmup_steps, 1))
    if not schedule.num_warmup_steps:
        return decay

    def rise(step):
        return peak * (step + 1) / schedule.num_warmup_steps

    return optax.join_schedules([rise, decay], [schedule.num_warmup_steps])


def decay_of(schedule: LibrarySchedule, peak: float, num_steps: int) -> optax.Schedule:
    """Returns the learning rate over the `num_steps` after the warm-up, as a function of 0 .. num_steps - 1."""
    match schedule:
        case ConstantSchedule():
            return optax.constant_schedule(peak)
        case CosineSchedule():
            return optax.cosine_decay_schedule(peak, max(num_steps - 1, 1), alpha=schedule.final_learning_rate_fraction)
        case LinearSchedule():
            final = peak * schedule.final_learning_rate_fraction
            return optax.linear_schedule(peak, final, max(num_steps - 1, 1))
        case WsdSchedule():
            return _wsd(schedule, peak, num_steps)
    raise AssertionError(schedule)


def _wsd(schedule: WsdSchedule, peak: float, num_steps: int) -> optax.Schedule:
    fall = 1 - schedule.final_learning_rate_fraction

    def rate(step):
        done = jnp.clip((step + 1 - (num_steps - schedule.num_decay_steps)) / schedule.num_decay_steps, 0.0, 1.0)
        return peak * (1 - fall * (jnp.sqrt(done) if schedule.decay_shape == "sqrt" else done))

    return rate


def transformation_of(config: LibraryOptimizer, setting: Setting) -> optax.GradientTransformation:
    """Returns the optimizer's direction, then weight decay, then scaling by minus the learning rate."""
    match config:
        case AdamWConfig():
            adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.epsilon)
            types: dict[str, MomentType] = {
                "mu": config.first_moment_dtype or config.moment_dtype,
                "nu": config.moment_dtype,
            }
            directions = [_stored(adam, config, setting, types)]
        case LionConfig():
            lion = optax.scale_by_lion(b1=config.b1, b2=config.b2)
            directions = [_stored(lion, config, setting, {"mu": config.moment_dtype})]
        case SgdConfig():
            trace = optax.identity()
            if config.momentum is not None:
                trace = optax.trace(config.momentum, nesterov=config.nesterov)
            directions = [stored_in(trace, config.moment_dtype)]
        case AdafactorConfig():
            directions = _adafactor(config, setting)
        case MuonConfig():
            directions = [_muon(config, setting)]
        case _:
            raise AssertionError(config)
    decay = optax.add_decayed_weights(config.weight_decay, mask=setting.decay_mask(config.weight_decay_on))
    return optax.chain(*directions, decay, optax.scale_by_learning_rate(setting.schedule))


def _stored(
    moments: optax.GradientTransformation,
    config: AdamWConfig | LionConfig,
    setting: Setting,
    types: Mapping[str, MomentType],
) -> optax.GradientTransformation:
    """Returns the transformation with its moments stored in the declared types. types: by their name in the state."""
    layouts = partial(
        moment_layouts, kinds=setting.kinds, specs=setting.layouts, mesh=setting.mesh, declared=config.moment_block
    )
    return stored_in_types(moments, types, layouts)


def _adafactor(config: AdafactorConfig, setting: Setting) -> list[optax.GradientTransformation]:
    parts = [
        optax.scale_by_factored_rms(decay_rate=config.decay_rate, min_dim_size_to_factor=config.min_dim_size_to_factor)
    ]
    parts += [optax.clip_by_block_rms(config.clipping_threshold)] if config.clipping_threshold is not None else []
    parts += [optax.scale_by_param_block_rms()] if config.multiply_by_parameter_scale else []
    mean = optax.ema(config.momentum, debias=False) if config.momentum is not None else optax.identity()
    return [each_layer(optax.chain(*parts), setting.kinds), stored_in(mean, config.moment_dtype)]


def _muon(config: MuonConfig, setting: Setting) -> optax.GradientTransformation:
    chosen = jax.tree.map(
        lambda kind, layout: (kind.groups, layout) if _is_in_muon(kind) else optax.MaskedNode(),
        setting.kinds,
        setting.layouts,
    )
    labels = jax.tree.map(lambda kind: "muon" if _is_in_muon(kind) else "adamw", setting.kinds)

    def orthogonal(momenta: Any, _: Any) -> Any:
        one = lambda x, how: _orthogonal(config, x, sides=how[0], layout=how[1], mesh=setting.mesh)  # noqa: E731
        return jax.tree.map(one, momenta, chosen)

    momentum = stored_in(optax.trace(config.momentum, nesterov=config.nesterov), config.moment_dtype)
    adam = stored_in(optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.epsilon), config.moment_dtype)
    muon = optax.chain(momentum, optax.stateless(orthogonal))
    return optax.partition({"muon": muon, "adamw": adam}, labels)


def _orthogonal(
    config: MuonConfig, stacked: jax.Array, *, sides: "DimGroups", layout: PartitionSpec, mesh: Mapping[str, int]
) -> jax.Array:
    """Returns the orthogonal factor of each layer's matrix, scaled to `update_rms`.

    Whole layers are distributed over devices: one change of layout before and one after. Left to the partitioner,
    each of the 15 matmuls of five steps would gather a factor.
    """
    newton_schulz = scale_by_muon(
        ns_steps=config.num_newton_schulz_steps,
        beta=0.0,
        nesterov=False,
        weight_dimension_numbers=MuonDimensionNumbers(*sides),  # all other dimensions hold copies
    )

    def of_layers(x: jax.Array) -> jax.Array:
        longest = max(math.prod(x.shape[d] for d in side) for side in sides)
        # An orthogonal n x m matrix has a root mean square of 1 / sqrt(max(n, m)).
        return newton_schulz.update(x, newton_schulz.init(x))[0] * (config.update_rms * longest**0.5)

    if math.prod(mesh.values()) == 1:
        return of_layers(stacked)
    spec = PartitionSpec(spread_axes(stacked.shape[0], mesh) or None)
    spread = jax.shard_map(of_layers, in_specs=spec, out_specs=spec, axis_names=set(mesh), check_vma=False)
    # Constrain both sides: otherwise the operands and the sum that it is part of would be resharded as well.
    here = partial(jax.lax.with_sharding_constraint, shardings=layout)
    return here(spread(here(stacked)))


def spread_axes(num_copies: int, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes over which copies can be spread evenly, tried in order: 8 over {fsdp: 4, tensor: 4} ->
    fsdp."""
    axes: list[str] = []
    for axis, size in mesh.items():
        if size > 1 and num_copies % size == 0:
            axes.append(axis)
            num_copies //= size
    return tuple(axes)


def _is_in_muon(kind: Any) -> bool:
    return kind.is_in_stack and len(kind.groups) == 2


def each_layer(whole: optax.GradientTransformation, kinds: Any) -> optax.GradientTransformation:
    """Returns the transformation applied to each layer of a stack separately, so that its maxima and means are per
    layer. Its state is split by component of the model."""
    stacked = {piece: jax.tree.leaves(tree)[0].is_in_stack for piece, tree in kinds.items()}

    def run(piece: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.vmap(function) if stacked[piece] else function

    def init(params: Any) -> Any:
        return {piece: run(piece, whole.init)(part) for piece, part in params.items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        assert params is not None
        done = {p: run(p, whole.update)(part, state[p], params[p]) for p, part in updates.items()}
        return {p: updates for p, (updates, _) in done.items()}, {p: state for p, (_, state) in done.items()}

    return optax.GradientTransformation(init, update)


DimGroups = tuple[tuple[int, ...], ...]  # dimensions, in groups

_COPIES = ("layers", "experts")  # leading dimensions along which a parameter holds copies of one thing


@dataclass(frozen=True)
class ParameterKind:
    """The dimensions of a parameter that form a matrix: an optimizer needs to know, and a shape does not say.

    layers/attention/query_EHD  (layers, embed, heads, head_dim)  ->  per layer a matrix embed x (heads head_dim)
    layers/mlp_norm/scale_E     (layers, embed)                   ->  per layer a vector

    groups: those of one copy; dimensions that act as one share a group
    (heads, head_dim). is_in_stack: True for a parameter of a layer, whose first dimension is `layers`.
    """

    groups: DimGroups
    is_in_stack: bool

    @property
    def is_matrix(self) -> bool:
        """Returns True for a matrix that multiplies activations; False for norm scales and biases."""
        return len(self.groups) > 1


def parameter_kinds(model: Model) -> Any:
    """Returns a `ParameterKind` for every parameter, as a tree like them."""
    stacks = {stack.name for stack in model.stacks}
    return {
        piece: jax.tree.map(partial(parameter_kind, is_in_stack=piece in stacks), tree, is_leaf=is_logical_axes)
        for piece, tree in model.logical_axes().items()
    }


def parameter_kind(axes: LogicalAxes, *, is_in_stack: bool) -> ParameterKind:
    """Returns the kind of a parameter: ('layers', 'embed', 'heads', 'head_dim') -> groups ((1,), (2, 3))."""
    num_copies = len(list(takewhile(lambda name: name in _COPIES, axes)))
    groups: list[tuple[int, ...]] = []
    for dimension in range(num_copies, len(axes)):
        is_within_head = axes[dimension] == "head_dim" and axes[dimension - 1] in ("heads", "kv_heads")
        if is_within_head and groups:
            groups[-1] = (*groups[-1], dimension)
        else:
            groups.append((dimension,))
    return ParameterKind(tuple(groups), is_in_stack)
