"""Declares optimizers and learning-rate schedules, and holds their registries. A user names their own by its import
path.

A declaration is read and checked without JAX and optax, which take longer to import. So the arithmetic is in
optimizers.py, which `build` and `decay` import.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from meshloom.models.config import Config, mistake

from ..core.config_types import Fraction, UpToOne
from ..core.errors import Problem
from ..core.float_types import MomentType
from ..core.format import counted

if TYPE_CHECKING:
    import optax

    from .contract import Setting

DecayOn = Literal["matrices", "all"]
MomentsOn = Literal["device", "host"]


class OptimizerConfig(Config):
    """The base of every optimizer. A subclass adds its name, `name: Literal["adamw"]`, and the keys that it needs."""

    if TYPE_CHECKING:
        name: Any

    learning_rate: PositiveFloat  # the peak; `schedule` sets the warm-up and the decay
    max_grad_norm: PositiveFloat | None  # gradients with a larger global norm are scaled down to it

    def build(self, setting: "Setting") -> "optax.GradientTransformation":
        """Returns the transformation from clipped gradients to what is added to the parameters, both in float32."""
        raise NotImplementedError

    @property
    def has_moments_on_host(self) -> bool:
        """Returns True if layers are updated one by one, with their moments in the memory of the host. An optimizer
        that has such moments computes each element of an update from that element of the gradient alone."""
        return False


class ScheduleConfig(Config):
    """The base of every schedule: `decay` is what follows the warm-up. A subclass adds its kind, `kind:
    Literal[...]`."""

    if TYPE_CHECKING:
        kind: Any

    num_warmup_steps: NonNegativeInt  # linear, from peak / num_warmup_steps to the peak

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if "build" in vars(cls):
            raise TypeError(f"{cls.__name__}.build would not be called: a schedule has `decay`, after the warm-up")

    def decay(self, peak: float, num_steps: int) -> "optax.Schedule":
        """Returns the learning rate over the `num_steps` after the warm-up, as a function of 0 .. num_steps - 1."""
        raise NotImplementedError

    def problems(self, num_steps: int) -> list[Problem]:  # noqa: ARG002
        """Returns what is wrong with it in a run of `num_steps`."""
        return []

    def warnings(self, peak: float, num_steps: int) -> list[Problem]:
        """Returns warnings about a run of `num_steps` that is valid but seldom intended: it may end in its warm-up."""
        if self.num_warmup_steps <= num_steps:
            return []
        last = peak * num_steps / self.num_warmup_steps
        what = f"is {self.num_warmup_steps} and num_steps is {num_steps}: the learning rate ends at {last:.3g} and never reaches {peak:.3g}"  # noqa: E501
        fix = f"use schedule.num_warmup_steps={num_steps // 10}, or a larger num_steps"
        return [Problem("schedule.num_warmup_steps", what, fix)]


# A moment that moves by less than 2^-8 of a like-sized gradient does not move at all: bfloat16 has 8 bits of precision.
_SLOWEST_BFLOAT16_DECAY = 1 - 2**-8


class LibraryOptimizer(OptimizerConfig):
    """The base of Meshloom's optimizers: moments, and decoupled weight decay (scaled by the learning rate alone)."""

    weight_decay: NonNegativeFloat
    weight_decay_on: DecayOn
    moment_dtype: MomentType  # the type in which moments are stored between steps

    # Why a type of 8 bits is refused; the types that are not here are accepted.
    refused_moments: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("int8", "float8"), "AdamW and Lion alone are known to train with moments of 8 bits"
    )

    def build(self, setting: "Setting") -> "optax.GradientTransformation":
        from .optimizers import transformation_of

        return transformation_of(self, setting)

    @model_validator(mode="after")
    def _check_moment_type(self) -> Self:
        if why := self.refused_moments.get(self.moment_dtype):
            use = [name for name in get_args(MomentType) if name not in self.refused_moments]
            raise mistake(f"is {self.moment_dtype}: {why}", f"use one of {', '.join(use)}", "moment_dtype")
        return self

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


class ElementwiseOptimizer(LibraryOptimizer):
    """The base of Meshloom's optimizers whose update of an element depends on no other: moments of a layer may come
    from the host's memory when its turn comes (compiler/step/streamed_update.py)."""

    moments_on: MomentsOn

    @property
    def has_moments_on_host(self) -> bool:
        return self.moments_on == "host"


def _check_block(block: int | None, *types: MomentType | None) -> None:
    if block is not None and not {"int8", "float8"} & set(types):
        what = f"is {block}, and no moments are stored in 8 bits"
        raise mistake(what, "set optimizer.moment_block=null, or optimizer.moment_dtype=int8 (float8 for lion)", "moment_block")  # fmt: skip  # noqa: E501


class AdamWConfig(ElementwiseOptimizer):
    """AdamW: Loshchilov and Hutter 2019, arXiv:1711.05101."""

    name: Literal["adamw"]
    b1: Fraction
    b2: Fraction
    epsilon: PositiveFloat
    first_moment_dtype: MomentType | None  # None: as moment_dtype
    moment_block: PositiveInt | None  # of moments of 8 bits; None: the nearest to 256 that divides the shard

    refused_moments: ClassVar[Mapping[str, str]] = {
        "float8": "second moments in float8 moved the loss the same way in each of four seeds"
    }

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_block(self.moment_block, self.moment_dtype, self.first_moment_dtype)
        if self.first_moment_dtype is None:
            return self._check_moments_move(b1=self.b1, b2=self.b2)
        self._check_moments_move(b2=self.b2)
        if self.first_moment_dtype == "bfloat16" and self.b1 > _SLOWEST_BFLOAT16_DECAY:
            what = f"{self.b1} moves a moment by less than bfloat16 can represent"
            raise mistake(what, "set optimizer.first_moment_dtype=float32, or a smaller optimizer.b1", "b1")
        return self


class LionConfig(ElementwiseOptimizer):
    """Lion: Chen et al. 2023, arXiv:2302.06675. The update is the sign of a mean of gradients."""

    name: Literal["lion"]
    b1: Fraction  # of the mean whose sign is the update
    b2: Fraction  # of the mean that is stored
    moment_block: PositiveInt | None  # of moments of 8 bits; None: the nearest to 256 that divides the shard

    refused_moments: ClassVar[Mapping[str, str]] = {
        "int8": "small moments become zero, and the loss was 0.7 to 1.9 % higher in each of three seeds"
    }

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_block(self.moment_block, self.moment_dtype)
        return self._check_moments_move(b2=self.b2)


class SgdConfig(ElementwiseOptimizer):
    """SGD with momentum: Sutskever et al. 2013. v <- momentum v + g; the update is v, or g + momentum v with
    Nesterov."""

    name: Literal["sgd"]
    momentum: Fraction | None
    nesterov: bool

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.momentum is None and self.nesterov:
            raise mistake("nesterov needs a momentum", "set optimizer.nesterov=false, or optimizer.momentum=0.9", "nesterov")  # fmt: skip  # noqa: E501
        if self.momentum is None and self.has_moments_on_host:
            what = "is host, but without a momentum there are no moments"
            raise mistake(what, "set optimizer.moments_on=device, or optimizer.momentum=0.9", "moments_on")
        return self._check_momentum(self.momentum)


class AdafactorConfig(LibraryOptimizer):
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


class MuonConfig(LibraryOptimizer):
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


class LibrarySchedule(ScheduleConfig):
    """The base of Meshloom's schedules."""

    def decay(self, peak: float, num_steps: int) -> "optax.Schedule":
        from .optimizers import decay_of

        return decay_of(self, peak, num_steps)


class ConstantSchedule(LibrarySchedule):
    kind: Literal["constant"]


class CosineSchedule(LibrarySchedule):
    """Cosine decay: Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts."""

    kind: Literal["cosine"]
    final_learning_rate_fraction: UpToOne  # of the peak, reached at the last step


class LinearSchedule(LibrarySchedule):
    kind: Literal["linear"]
    final_learning_rate_fraction: UpToOne  # of the peak, reached at the last step


class WsdSchedule(LibrarySchedule):
    """Warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395. sqrt: Haegele et al. 2024, arXiv:2405.18392."""

    kind: Literal["wsd"]
    num_decay_steps: PositiveInt  # at the end of the run
    decay_shape: Literal["linear", "sqrt"]
    final_learning_rate_fraction: UpToOne  # of the peak, reached at the last step

    def problems(self, num_steps: int) -> list[Problem]:
        if (needed := self.num_warmup_steps + self.num_decay_steps) <= num_steps:
            return []
        what = f"a warm-up of {counted(self.num_warmup_steps, 'step')} and a decay of {self.num_decay_steps} "
        what += f"are {counted(needed, 'step')}, num_steps is {num_steps}"
        room = num_steps - self.num_warmup_steps
        fix = f"use schedule.num_decay_steps={room}" if room > 0 else f"use num_steps={needed}"
        return [Problem("schedule.num_decay_steps", what, fix)]


OPTIMIZERS: tuple[type[OptimizerConfig], ...] = (AdamWConfig, AdafactorConfig, LionConfig, MuonConfig, SgdConfig)
SCHEDULES: tuple[type[ScheduleConfig], ...] = (ConstantSchedule, CosineSchedule, LinearSchedule, WsdSchedule)
