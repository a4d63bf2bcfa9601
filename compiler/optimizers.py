"""The optimizers: each a typed config that builds its optax transformation.

An optimizer is a subclass of `OptimizerConfig` with a `name` and `build`. The compiler does the rest for all of them
alike (compiler/optimizer.py): clipping by global norm before it, float32 arithmetic, the layout of its state.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from meshloom.models.config import Config

from .config_types import FloatType, Fraction

DecayOn = Literal["matrices", "all"]

# A moment that moves by less than 2^-8 of a like-sized gradient does not move at all: bfloat16 has 8 bits of precision.
_SLOWEST_BFLOAT16_DECAY = 1 - 2**-8


@dataclass(frozen=True)
class Setting:
    """What an optimizer is built for. schedule: step -> learning rate. kinds: a ParameterKind for every parameter, as
    a tree like them."""

    schedule: optax.Schedule
    kinds: Any

    def decay_mask(self, weight_decay_on: DecayOn) -> Any:
        """True where weight decay acts. `matrices`: not on norm scales and biases."""
        return jax.tree.map(lambda kind: kind.is_matrix or weight_decay_on == "all", self.kinds)


class OptimizerConfig(Config):
    """The base of every optimizer. One adds its name, `name: Literal["adamw"]`, and the keys that it needs."""

    learning_rate: PositiveFloat  # its peak; `schedule` says how it is reached and left
    max_grad_norm: PositiveFloat | None  # gradients with a larger global norm are scaled down to it

    def build(self, setting: Setting) -> optax.GradientTransformation:
        """Gradients behind clipping -> what is added to the parameters. Parameters and gradients come in float32."""
        raise NotImplementedError


class AdamWConfig(OptimizerConfig):
    """Loshchilov and Hutter 2019, arXiv:1711.05101; decay is multiplied with the learning rate."""

    name: Literal["adamw"]
    b1: Fraction
    b2: Fraction
    epsilon: PositiveFloat
    weight_decay: NonNegativeFloat
    weight_decay_on: DecayOn
    moment_dtype: FloatType

    @model_validator(mode="after")
    def _check(self) -> Self:
        return _check_moments_move(self, b1=self.b1, b2=self.b2)

    def build(self, setting: Setting) -> optax.GradientTransformation:
        adam = stored_in(optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.epsilon), self.moment_dtype)
        return optax.chain(adam, *_decay_and_rate(self.weight_decay, setting, self.weight_decay_on))


class LionConfig(OptimizerConfig):
    """Chen et al. 2023, arXiv:2302.06675: the sign of a mean of gradients, so all entries move alike."""

    name: Literal["lion"]
    b1: Fraction  # of the mean whose sign is the update
    b2: Fraction  # of the mean that is kept
    weight_decay: NonNegativeFloat
    weight_decay_on: DecayOn
    moment_dtype: FloatType

    @model_validator(mode="after")
    def _check(self) -> Self:
        return _check_moments_move(self, b2=self.b2)

    def build(self, setting: Setting) -> optax.GradientTransformation:
        lion = stored_in(optax.scale_by_lion(b1=self.b1, b2=self.b2), self.moment_dtype)
        return optax.chain(lion, *_decay_and_rate(self.weight_decay, setting, self.weight_decay_on))


class SgdConfig(OptimizerConfig):
    """Sutskever et al. 2013: v <- momentum v + g; the update is v, or g + momentum v with Nesterov."""

    name: Literal["sgd"]
    momentum: Fraction | None
    nesterov: bool
    weight_decay: NonNegativeFloat
    weight_decay_on: DecayOn
    moment_dtype: FloatType

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.momentum is None and self.nesterov:
            raise _mistake("nesterov", "nesterov needs a momentum", "set optimizer.nesterov=false, or optimizer.momentum=0.9")  # fmt: skip  # noqa: E501
        return _check_has_moments(self, self.momentum)

    def build(self, setting: Setting) -> optax.GradientTransformation:
        trace = optax.trace(self.momentum, nesterov=self.nesterov) if self.momentum is not None else optax.identity()
        momentum = stored_in(trace, self.moment_dtype)
        return optax.chain(momentum, *_decay_and_rate(self.weight_decay, setting, self.weight_decay_on))


class AdafactorConfig(OptimizerConfig):
    """Shazeer and Stern 2018, arXiv:1804.04235: second moments as a row and a column of the two largest dimensions of
    each layer's array. It divides by no first moment, unless `momentum` is set."""

    name: Literal["adafactor"]
    decay_rate: Annotated[float, Field(gt=0, lt=1)]  # c of the second moment's decay 1 - step^-c
    min_dim_size_to_factor: PositiveInt  # smaller arrays keep their second moment whole
    clipping_threshold: Annotated[float, Field(ge=1)] | None  # of the root mean square of an array's update
    multiply_by_parameter_scale: bool  # learning_rate is relative to the root mean square of each array
    momentum: Fraction | None
    weight_decay: NonNegativeFloat
    weight_decay_on: DecayOn
    moment_dtype: FloatType  # of the momentum; factored moments are small, and float32 always

    @model_validator(mode="after")
    def _check(self) -> Self:
        return _check_has_moments(self, self.momentum)

    def build(self, setting: Setting) -> optax.GradientTransformation:
        parts = [
            optax.scale_by_factored_rms(decay_rate=self.decay_rate, min_dim_size_to_factor=self.min_dim_size_to_factor)
        ]
        parts += [optax.clip_by_block_rms(self.clipping_threshold)] if self.clipping_threshold is not None else []
        parts += [optax.scale_by_param_block_rms()] if self.multiply_by_parameter_scale else []
        mean = optax.ema(self.momentum, debias=False) if self.momentum is not None else optax.identity()
        return optax.chain(
            each_layer(optax.chain(*parts), setting.kinds),
            stored_in(mean, self.moment_dtype),
            *_decay_and_rate(self.weight_decay, setting, self.weight_decay_on),
        )


class MuonConfig(OptimizerConfig):
    """Jordan 2024 (github.com/KellerJordan/Muon), as scaled by Liu et al. 2025, arXiv:2502.16982: the momentum of each
    matrix of a layer is made orthogonal. AdamW for the rest: embedding, head, norm scales, biases."""

    name: Literal["muon"]
    momentum: Fraction
    nesterov: bool
    num_newton_schulz_steps: PositiveInt
    update_rms: PositiveFloat  # of the orthogonal update; AdamW's is about 0.2, so that one learning rate serves both
    b1: Fraction  # of AdamW, with the next two
    b2: Fraction
    epsilon: PositiveFloat
    weight_decay: NonNegativeFloat
    weight_decay_on: DecayOn
    moment_dtype: FloatType

    @model_validator(mode="after")
    def _check(self) -> Self:
        return _check_moments_move(self, momentum=self.momentum, b1=self.b1, b2=self.b2)

    def build(self, setting: Setting) -> optax.GradientTransformation:
        views = jax.tree.map(_matrix_view, setting.kinds)
        labels = jax.tree.map(lambda view: "adamw" if view is None else "muon", views, is_leaf=_is_view)
        masked = jax.tree.map(lambda view: optax.MaskedNode() if view is None else view, views, is_leaf=_is_view)
        muon = optax.chain(
            scale_by_muon(
                ns_steps=self.num_newton_schulz_steps,
                beta=self.momentum,
                nesterov=self.nesterov,
                mu_dtype=self.moment_dtype,
                weight_dimension_numbers=lambda _: masked,
            ),
            optax.stateless(lambda updates, _: jax.tree.map(self._to_rms, updates, masked)),
        )
        adam = stored_in(optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.epsilon), self.moment_dtype)
        return optax.chain(
            optax.partition({"muon": muon, "adamw": adam}, labels),
            *_decay_and_rate(self.weight_decay, setting, self.weight_decay_on),
        )

    def _to_rms(self, orthogonal: jax.Array, view: MuonDimensionNumbers) -> jax.Array:
        """An orthogonal n x m matrix has a root mean square of 1 / sqrt(max(n, m))."""
        sides: Any = view
        longest = max(math.prod(orthogonal.shape[d] for d in side) for side in sides)
        return orthogonal * (self.update_rms * longest**0.5)


OptimizerSpec = Annotated[
    AdamWConfig | AdafactorConfig | LionConfig | MuonConfig | SgdConfig, Field(discriminator="name")
]


def stored_in(moments: optax.GradientTransformation, dtype: FloatType) -> optax.GradientTransformation:
    """The transformation with the arrays of its state kept in `dtype` between steps, and computed with in float32."""

    def cast(state: Any, dtype: Any) -> Any:
        is_moment = lambda x: jnp.ndim(x) > 0 and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
        return jax.tree.map(lambda x: x.astype(dtype) if is_moment(x) else x, state)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = moments.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(moments.init(params), dtype), update)


def each_layer(whole: optax.GradientTransformation, kinds: Any) -> optax.GradientTransformation:
    """The transformation on each layer of a stack by itself: what it finds largest, or takes a mean over, is within a
    layer. State: by piece of the model."""
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


def _decay_and_rate(weight_decay: float, setting: Setting, weight_decay_on: DecayOn) -> list[Any]:
    """Decoupled weight decay, then the learning rate with the sign of a descent."""
    decay = optax.add_decayed_weights(weight_decay, mask=setting.decay_mask(weight_decay_on))
    return [decay, optax.scale_by_learning_rate(setting.schedule)]


def _matrix_view(kind: Any) -> MuonDimensionNumbers | None:
    """The two sides of a layer's matrix, None for what is none. Dimensions that are on neither side are copies."""
    if not (kind.is_in_stack and len(kind.groups) == 2):
        return None
    reduction, output = kind.groups
    return MuonDimensionNumbers(reduction, output)


def _is_view(node: Any) -> bool:
    return node is None or isinstance(node, MuonDimensionNumbers)


def _check_moments_move(config: Any, **decays: float) -> Any:
    for key, decay in decays.items():
        if config.moment_dtype == "bfloat16" and decay > _SLOWEST_BFLOAT16_DECAY:
            what = f"{decay} moves a moment by less than bfloat16 can hold"
            fix = f"set optimizer.moment_dtype=float32, or optimizer.{key}={int(_SLOWEST_BFLOAT16_DECAY * 1000) / 1000} or less"  # noqa: E501
            raise _mistake(key, what, fix)
    return config


def _check_has_moments(config: Any, momentum: float | None) -> Any:
    if momentum is None and config.moment_dtype != "float32":
        what = f"{config.moment_dtype} moments, and without a momentum there are none"
        raise _mistake("moment_dtype", what, "set optimizer.moment_dtype=float32, or optimizer.momentum=0.9")
    return _check_moments_move(config, **({} if momentum is None else {"momentum": momentum}))


def _mistake(key: str, what: str, fix: str) -> PydanticCustomError:
    return PydanticCustomError("optimizer", "{what}", {"what": what, "key": key, "fix": fix})
