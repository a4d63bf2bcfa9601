"""The optimizers: each is a typed config that builds its optax transformation.

An optimizer is a subclass of `OptimizerConfig` with a `name` and `build`. The compiler does the rest for all of them
(compiler/sharding/state.py): clipping by global norm, float32 arithmetic and the layout of the state.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, Self

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers, scale_by_muon
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from meshloom.models.config import mistake

from ..core.config_types import FloatType, Fraction
from .contract import DecayOn, OptimizerConfig, Setting
from .parameter_kinds import DimGroups

# A moment that moves by less than 2^-8 of a like-sized gradient does not move at all: bfloat16 has 8 bits of precision.
_SLOWEST_BFLOAT16_DECAY = 1 - 2**-8


class _MomentsConfig(OptimizerConfig):
    """The base of Meshloom's optimizers: moments, and decoupled weight decay (scaled by the learning rate alone)."""

    weight_decay: NonNegativeFloat
    weight_decay_on: DecayOn
    moment_dtype: FloatType  # the type in which moments are stored between steps

    def _stepped(self, *directions: optax.GradientTransformation, setting: Setting) -> optax.GradientTransformation:
        """Returns the transformations, then weight decay, then scaling by minus the learning rate."""
        decay = optax.add_decayed_weights(self.weight_decay, mask=setting.decay_mask(self.weight_decay_on))
        return optax.chain(*directions, decay, optax.scale_by_learning_rate(setting.schedule))

    def _check_moments_move(self, **decays: float) -> Self:
        for key, decay in decays.items():
            if self.moment_dtype == "bfloat16" and decay > _SLOWEST_BFLOAT16_DECAY:
                what = f"{decay} moves a moment by less than bfloat16 can represent"
                most = int(_SLOWEST_BFLOAT16_DECAY * 1000) / 1000
                fix = f"set optimizer.moment_dtype=float32, or optimizer.{key}={most} or less"
                raise mistake(what, fix, key)
        return self

    def _check_momentum(self, momentum: float | None) -> Self:
        if momentum is not None:
            return self._check_moments_move(momentum=momentum)
        if self.moment_dtype != "float32":
            what = f"is {self.moment_dtype}, but without a momentum there are no moments"
            raise mistake(what, "set optimizer.moment_dtype=float32, or optimizer.momentum=0.9", "moment_dtype")
        return self


class AdamWConfig(_MomentsConfig):
    """AdamW: Loshchilov and Hutter 2019, arXiv:1711.05101."""

    name: Literal["adamw"]
    b1: Fraction
    b2: Fraction
    epsilon: PositiveFloat

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self._check_moments_move(b1=self.b1, b2=self.b2)

    def build(self, setting: Setting) -> optax.GradientTransformation:
        adam = stored_in(optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.epsilon), self.moment_dtype)
        return self._stepped(adam, setting=setting)


class LionConfig(_MomentsConfig):
    """Lion: Chen et al. 2023, arXiv:2302.06675. The update is the sign of a mean of gradients."""

    name: Literal["lion"]
    b1: Fraction  # of the mean whose sign is the update
    b2: Fraction  # of the mean that is stored

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self._check_moments_move(b2=self.b2)

    def build(self, setting: Setting) -> optax.GradientTransformation:
        lion = stored_in(optax.scale_by_lion(b1=self.b1, b2=self.b2), self.moment_dtype)
        return self._stepped(lion, setting=setting)


class SgdConfig(_MomentsConfig):
    """SGD with momentum: Sutskever et al. 2013. v <- momentum v + g; the update is v, or g + momentum v with
    Nesterov."""

    name: Literal["sgd"]
    momentum: Fraction | None
    nesterov: bool

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.momentum is None and self.nesterov:
            raise mistake("nesterov needs a momentum", "set optimizer.nesterov=false, or optimizer.momentum=0.9", "nesterov")  # fmt: skip  # noqa: E501
        return self._check_momentum(self.momentum)

    def build(self, setting: Setting) -> optax.GradientTransformation:
        trace = optax.trace(self.momentum, nesterov=self.nesterov) if self.momentum is not None else optax.identity()
        return self._stepped(stored_in(trace, self.moment_dtype), setting=setting)


class AdafactorConfig(_MomentsConfig):
    """Adafactor: Shazeer and Stern 2018, arXiv:1804.04235. The second moment of each layer's array is factored into a
    row and a column over its two largest dimensions, in float32. There is a first moment only if `momentum` is set."""

    name: Literal["adafactor"]
    decay_rate: Annotated[float, Field(gt=0, lt=1)]  # c of the second moment's decay 1 - step^-c
    min_dim_size_to_factor: PositiveInt  # smaller arrays have an unfactored second moment
    clipping_threshold: Annotated[float, Field(ge=1)] | None  # of the root mean square of an array's update
    multiply_by_parameter_scale: bool  # learning_rate is relative to the root mean square of each array
    momentum: Fraction | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self._check_momentum(self.momentum)

    def build(self, setting: Setting) -> optax.GradientTransformation:
        parts = [
            optax.scale_by_factored_rms(decay_rate=self.decay_rate, min_dim_size_to_factor=self.min_dim_size_to_factor)
        ]
        parts += [optax.clip_by_block_rms(self.clipping_threshold)] if self.clipping_threshold is not None else []
        parts += [optax.scale_by_param_block_rms()] if self.multiply_by_parameter_scale else []
        mean = optax.ema(self.momentum, debias=False) if self.momentum is not None else optax.identity()
        factored = each_layer(optax.chain(*parts), setting.kinds)
        return self._stepped(factored, stored_in(mean, self.moment_dtype), setting=setting)


class MuonConfig(_MomentsConfig):
    """Muon: Jordan 2024 (github.com/KellerJordan/Muon), as scaled by Liu et al. 2025, arXiv:2502.16982. The momentum of
    each matrix of a layer is orthogonalized. The other parameters (embedding, head, norm scales, biases) use AdamW."""

    name: Literal["muon"]
    momentum: Fraction
    nesterov: bool
    num_newton_schulz_steps: PositiveInt
    update_rms: PositiveFloat  # of the orthogonal update; AdamW's is about 0.2, so that one learning rate serves both
    b1: Fraction  # this and the next two are AdamW's
    b2: Fraction
    epsilon: PositiveFloat

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self._check_moments_move(momentum=self.momentum, b1=self.b1, b2=self.b2)

    def build(self, setting: Setting) -> optax.GradientTransformation:
        chosen = jax.tree.map(
            lambda kind, layout: (kind.groups, layout) if _is_in_muon(kind) else optax.MaskedNode(),
            setting.kinds,
            setting.layouts,
        )
        labels = jax.tree.map(lambda kind: "muon" if _is_in_muon(kind) else "adamw", setting.kinds)

        def orthogonal(momenta: Any, _: Any) -> Any:
            one = lambda x, how: self._orthogonal(x, sides=how[0], layout=how[1], mesh=setting.mesh)  # noqa: E731
            return jax.tree.map(one, momenta, chosen)

        momentum = stored_in(optax.trace(self.momentum, nesterov=self.nesterov), self.moment_dtype)
        adam = stored_in(optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.epsilon), self.moment_dtype)
        muon = optax.chain(momentum, optax.stateless(orthogonal))
        return self._stepped(optax.partition({"muon": muon, "adamw": adam}, labels), setting=setting)

    def _orthogonal(
        self, stacked: jax.Array, *, sides: DimGroups, layout: PartitionSpec, mesh: Mapping[str, int]
    ) -> jax.Array:
        """Returns the orthogonal factor of each layer's matrix, scaled to `update_rms`.

        Whole layers are distributed over devices: one change of layout before and one after. Left to the partitioner,
        each of the 15 matmuls of five steps would gather a factor.
        """
        newton_schulz = scale_by_muon(
            ns_steps=self.num_newton_schulz_steps,
            beta=0.0,
            nesterov=False,
            weight_dimension_numbers=MuonDimensionNumbers(*sides),  # all other dimensions hold copies
        )

        def of_layers(x: jax.Array) -> jax.Array:
            longest = max(math.prod(x.shape[d] for d in side) for side in sides)
            # An orthogonal n x m matrix has a root mean square of 1 / sqrt(max(n, m)).
            return newton_schulz.update(x, newton_schulz.init(x))[0] * (self.update_rms * longest**0.5)

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


def stored_in(moments: optax.GradientTransformation, dtype: FloatType) -> optax.GradientTransformation:
    """Returns the transformation with its state stored in `dtype` between steps and computed in float32."""

    def cast(state: Any, dtype: Any) -> Any:
        is_moment = lambda x: jnp.ndim(x) > 0 and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
        return jax.tree.map(lambda x: x.astype(dtype) if is_moment(x) else x, state)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = moments.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(moments.init(params), dtype), update)


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
