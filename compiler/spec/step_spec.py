"""StepSpec: the typed, frozen part of a declaration that reaches a program. Each default is written once, in `conf/`.

Quantities end in their unit, counts start with `num_`, batch sizes are global unless they say otherwise.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    SerializeAsAny,
    model_validator,
)

from meshloom.models.config import AdapterConfig, Config, DoraConfig, LoraConfig, ModelConfig, RsLoraConfig, mistake

from ..core.config_types import Fraction, NumBytes, Seed, Text
from ..core.float_types import ComputeType, FloatType
from ..optim.configs import OptimizerConfig, ScheduleConfig
from .calibration_spec import Calibration
from .objective_spec import ObjectiveSpec
from .overlap_spec import StepOverlap, StrategyChoice
from .pipeline_spec import StepPipeline
from .program_keys import ProgramKeys
from .secrets import Sources, as_compared, as_written
from .sharding_spec import ShardingRules

TokenOrderName = Literal["zigzag", "contiguous"]
RematPolicy = Literal["none", "minimal", "save_dots", "save_names", "offload", "by_name", "full"]
TAKES_NAMES: tuple[RematPolicy, ...] = ("save_names", "offload", "minimal", "save_dots")
RematChoice = Literal["save", "offload", "recompute"]


class LossScaleSpec(Config):
    """Dynamic loss scaling: Micikevicius et al. 2018, arXiv:1710.03740. The loss is multiplied by a scale, so that
    small gradients are not lost in float16. If a gradient overflows, the update is skipped and the scale is lowered."""

    initial: PositiveFloat
    growth_factor: Annotated[float, Field(ge=1)]
    growth_interval: PositiveInt  # updates without an overflow until the scale grows
    backoff_factor: Annotated[float, Field(gt=0, lt=1)]


class MatmulPrecision(Config):
    """The types in which the matmuls of some parameters multiply (compiler/formats/operands.py).

    match: a pattern of their paths, such as layers/mlp/* or head/*; null: of all matmuls of layers, but routers and
    adapters. forward: how x and the weight are written; null: as they are. gradients: how the gradient of the result
    is, in the backward pass; null: as it is. rounding: of gradients, to the nearest or up and down at random. gather:
    how weights are written while they are shards, and gathered; null: the compute type. history: the scales of x, the
    weight and the gradient come from their largest magnitudes in so many steps before; null: from those now.
    """

    match: Text | None
    forward: Text | None
    gradients: Text | None
    rounding: Literal["nearest", "stochastic"] = "nearest"
    gather: Text | None = None
    history: PositiveInt | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gradients is not None and self.forward is None:
            what = f"gradients cannot be in {self.gradients} where x and the weight are as they are"
            raise mistake(what, "set gradients: null, or give forward, too", "gradients")
        if self.rounding == "stochastic" and self.gradients is None:
            raise mistake("only gradients in few bits are rounded", "set rounding: nearest", "rounding")
        if None not in (self.gather, self.forward) and self.gather != self.forward:
            what = f"weights gathered in {self.gather} would be rounded again to {self.forward}"
            raise mistake(what, f"set gather: {self.forward}, or null", "gather")
        if self.history is not None and self.gradients is None:
            what = "scales come from steps before where all three products of a site are in few bits"
            raise mistake(what, "set history: null, or give forward and gradients", "history")
        return self


class PrecisionSpec(Config):
    parameters: FloatType  # as stored and saved, and read by the forward pass
    master: Literal["float32"] | None  # the updated weights, laid out as optimizer state; None: the parameters
    compute: ComputeType  # parameters are cast to it once per step, and gathered in it
    gradients: FloatType  # the type in which they are accumulated over layers' uses and microbatches
    gradient_reduction: FloatType  # the type in which gradients are reduced over the network
    frozen: FloatType | None  # the type in which frozen parameters are stored; None: as the others; under an adapter
    # as they are computed with, since they are never updated
    loss_scale: LossScaleSpec | None  # for float16 only
    matmuls: tuple[MatmulPrecision, ...]  # types of few bits in which matmuls multiply: the first rule that matches
    dispatch: Text | None  # the type in which tokens are sent to experts on other devices; None: the compute type
    dispatch_gradients: Text | None  # likewise, backward, of the gradients of what experts return
    emulate: bool  # multiply in float32 what is rounded to these types: for any target, and no faster

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.master == self.parameters:
            raise mistake("parameters in float32 need no master copy", "set precision.master=null", "master")
        if self.compute == "float16" and self.loss_scale is None:
            what = "float16 loses small gradients without a loss scale"
            raise mistake(what, "choose precision=float16, or precision.compute=bfloat16", "loss_scale")
        if self.compute != "float16" and self.loss_scale is not None:
            what = f"a loss scale is only for float16, and precision.compute is {self.compute}"
            raise mistake(what, "set precision.loss_scale=null, or precision.compute=float16", "loss_scale")
        return self

    @property
    def has_few_bits(self) -> bool:
        """Returns True where matmuls, or what is sent to experts, are in types of few bits."""
        return bool(self.matmuls or self.dispatch or self.dispatch_gradients)


class RematSpec(Config):
    """Rematerialisation saves some results of a layer's forward pass for the backward pass, and recomputes the rest."""

    policy: RematPolicy  # for every stack of layers
    stacks: dict[str, RematPolicy]  # for single stacks, by name
    names: tuple[Text, ...]  # the activations that save_names, and minimal and save_dots besides others, save, and that
    # offload moves to host memory
    choices: dict[Text, RematChoice]  # by_name: what becomes of activations, by name; the others are recomputed

    @model_validator(mode="after")
    def _check(self) -> Self:
        by_name = "by_name" in self.policies
        if by_name and not self.choices:
            what = "is empty, and by_name saves or offloads activations by name"
            raise mistake(what, "set remat.choices={...}, such as {layer_input: offload, attended: save}", "choices")
        if self.choices and not by_name:
            what = f"chooses for {', '.join(self.choices)}, but the policy {self.policy} has no choices"
            raise mistake(what, "set remat.choices={}, or choose remat=by_name", "choices")
        need_names = [policy for policy in self.policies if policy in ("save_names", "offload")]
        if need_names and not self.names:
            what = f"is empty, and {need_names[0]} saves activations by name"
            raise mistake(what, "set remat.names=[...], such as [attended, hidden]", "names")
        if self.names and not {*TAKES_NAMES}.intersection(self.policies):
            what = f"names {', '.join(self.names)}, but the policy {self.policy} saves no activations by name"
            fix = "set remat.names=[], or choose remat=save_names, offload, minimal or save_dots"
            raise mistake(what, fix, "names")
        return self

    @property
    def policies(self) -> tuple[RematPolicy, ...]:
        """Those of all stacks of layers and of single ones."""
        return self.policy, *self.stacks.values()


class LossSpec(Config):
    """Mean cross-entropy per target, in float32."""

    z_loss_weight: NonNegativeFloat  # weight of log(z)^2, which keeps logits from drifting (PaLM: 1e-4); 0: off
    # Float32 logits held at once per device are limited to the larger of the two; the head runs on chunks of that size.
    max_logits_bytes: NumBytes
    max_logits_share: Fraction  # of a device's memory
    num_chunks: PositiveInt | None  # chunks of tokens, one after the other; None: as few as the two allow


class MoeSpec(Config):
    """The limits by which tokens are sent to experts (docs/experts.md)."""

    max_imbalance: Annotated[float, Field(ge=1)] | None  # rows of a buffer, over the mean; None: for any imbalance
    capacity_factor: PositiveFloat  # parallel.experts=capacity: rows of an expert, over the mean
    num_chunks: PositiveInt  # chunks of a device's tokens: one is sent while the experts of another run
    tile_rows: Annotated[int, Field(ge=128, multiple_of=128)] | None  # of megablox, for TPUs; None: chosen by chip


class BatchSpec(ProgramKeys):
    """How documents lie in the sequences of a batch.

    packing: how documents are packed into sequences; pairs: each is a sequence, the
    chosen one of a pair before the rejected one; given: a class of the user returns whole sequences.
    isolate_documents: batches mark where documents begin, and the last token of a document has no target.
    """

    packing: Literal["concatenate", "first_fit", "pairs", "given"]
    isolate_documents: bool

    @classmethod
    def of(cls, whole: Any) -> Self:
        """Returns how sequences are made, without where their documents come from."""
        packing = "given" if whole.gives_sequences else whole.packing
        return cls.model_construct(packing=packing, isolate_documents=whole.isolate_documents)

    @property
    def gives_sequences(self) -> bool:
        """Returns True if a class of the user returns whole sequences."""
        return self.packing == "given"

    @property
    def may_pad(self) -> bool:
        """Returns True if sequences may be padded: places of a batch that hold no token."""
        return self.gives_sequences or self.packing != "concatenate"


class ReplayCheck(ProgramKeys):
    """check_every_num_steps: how often a step that is not suspect runs twice, and replicas of the state are
    compared."""

    check_every_num_steps: PositiveInt | None


class NoAdapter(Config):
    """The option `adapter=none`, which reads as null."""

    kind: Literal["none"]


def _null_for_none(adapter: AdapterConfig | NoAdapter | None) -> AdapterConfig | None:
    return None if isinstance(adapter, NoAdapter) else adapter


AnyAdapter = Annotated[LoraConfig | RsLoraConfig | DoraConfig | NoAdapter, Field(discriminator="kind")]
if TYPE_CHECKING:
    AdapterSpec = AdapterConfig | None
else:
    AdapterSpec = Annotated[AnyAdapter | None, AfterValidator(_null_for_none)]


class StepSpec(ProgramKeys):
    """Everything that the programs of a run depend on, except the devices that they are compiled for (PlanSpec). Its
    keys are those of the fingerprint. `global_batch_size` is in sequences, over all devices and microbatches."""

    model: SerializeAsAny[ModelConfig]
    adapter: AdapterSpec  # what is trained instead of the model
    calibration: Calibration
    sharding: ShardingRules
    pipeline: StepPipeline
    precision: PrecisionSpec
    remat: RematSpec
    overlap: StepOverlap
    loss: LossSpec
    objective: ObjectiveSpec
    moe: MoeSpec
    parallel: dict[Text, StrategyChoice]  # by operation (compiler/parallel/registry.py)
    optimizer: SerializeAsAny[OptimizerConfig]
    schedule: SerializeAsAny[ScheduleConfig]
    data: BatchSpec
    replay: ReplayCheck
    frozen_parameters: tuple[Text, ...]  # patterns of paths, such as embed/*: no gradient and no update
    on_nonfinite: Literal["stop", "skip", "replay"]  # for a step whose loss or gradient norm is not finite: no update,
    # or run again to tell the data from the hardware
    seed: Seed
    num_steps: PositiveInt
    global_batch_size: PositiveInt
    sequence_length: PositiveInt
    token_order: TokenOrderName  # of the tokens of a sequence, where mesh axes split its length
    num_microbatches: PositiveInt

    _sources: Sources = PrivateAttr(default_factory=dict)  # of values that came from the environment

    @classmethod
    def of(cls, whole: Any) -> Self:
        """Returns this class's part of a declaration, with the sources of its values."""
        return super().of(whole).with_sources(whole._sources)

    def with_sources(self, sources: Sources) -> Self:
        """Returns the declaration with the sources of its values, so that values from the environment are not
        written."""
        copied = self.model_copy()
        copied._sources = sources
        return copied

    def settled(self, **chosen: Any) -> Self:
        """Returns the declaration with values that a pass chose because it left the choice; the typed overrides still
        declare it."""
        return super().model_copy(update=chosen)

    @property
    def chosen_here(self) -> str | None:
        """Returns the line that says what was chosen for this machine; None if nothing was."""
        return None

    def as_written(self) -> dict[str, Any]:
        """Returns the declaration as JSON values for files and people, with `${oc.env:TOKEN}` instead of its value."""
        return as_written(self.model_dump(mode="json"), self._sources)

    def as_compared(self) -> dict[str, Any]:
        """Returns the declaration as JSON values that are equal exactly if the declarations are, with digests of
        secrets."""
        return as_compared(self.model_dump(mode="json"), self._sources)

    def compared_value(self, key: str, value: Any) -> Any:
        """Returns one value of the declaration in the same form."""
        return as_compared(value, self._sources, key)

    @property
    def may_skip(self) -> bool:
        """Returns True if a non-finite step is skipped; a loss scale always skips them, to find its size."""
        return self.on_nonfinite == "skip" or self.precision.loss_scale is not None

    @property
    def keeps_state(self) -> bool:
        """Returns True if the state before a step is kept until it is known what came of the step."""
        return self.on_nonfinite == "replay" or self.replay.check_every_num_steps is not None

    @property
    def has_pairs(self) -> bool:
        """Returns True if sequences 2i and 2i + 1 of a batch are a pair that the objective compares."""
        return self.objective.compares_pairs

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length
