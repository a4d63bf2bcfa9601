"""What a declaration says of each family of models, and the registry of families. A user's is named by its import path.

A declaration is read and checked without JAX, in a fraction of the time that it takes to import. So a family's layers
are in a file of their own, which `build` imports.
"""

import math
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from .config import Config, ModelConfig, divisors, mistake

if TYPE_CHECKING:
    from .contract import Model

CLAMPED_SWIGLU = "clamped_swiglu"  # the activation of gated MLPs alone
NormKind = Literal["rms", "rms_zero_centered", "layer"]


class Llama3Scaling(Config):
    """Llama 3.1's stretch of rotary wavelengths for longer contexts (arXiv:2407.21783; the constants are from Meta's
    release).

    Wavelengths shorter than original_length / high_frequency_factor stay, those longer than original_length /
    low_frequency_factor are `factor` times as long, with a smooth passage between; with equal factors, there is none.
    """

    kind: Literal["llama3"]
    factor: PositiveFloat
    low_frequency_factor: PositiveFloat
    high_frequency_factor: PositiveFloat
    original_length: PositiveInt

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low_frequency_factor <= self.high_frequency_factor:
            return self
        what = f"{self.low_frequency_factor} is more than high_frequency_factor={self.high_frequency_factor}"
        raise mistake(what, "exchange them: Llama 3.1 has 1 and 4", "low_frequency_factor")


class LinearScaling(Config):
    """All rotary wavelengths are `factor` times as long (Chen et al. 2023, arXiv:2306.15595)."""

    kind: Literal["linear"]
    factor: PositiveFloat


class YarnScaling(Config):
    """YaRN (Peng et al. 2023, arXiv:2309.00071), with the two factors of DeepSeek-V2 (arXiv:2405.04434).

    Dimensions that turn more than `beta_fast` times over original_length stay, those that turn less than `beta_slow`
    times have wavelengths `factor` times as long, and the stretch is linear in the number of the dimension between.
    truncate: both bounds are whole dimensions.

    With m(x) = 0.1 x ln(factor) + 1, turned heads are multiplied by m(mscale) / m(mscale_all_dim), and scores by
    m(mscale_all_dim)^2. The paper has 1 and 0.
    """

    kind: Literal["yarn"]
    factor: Annotated[float, Field(gt=1)]
    original_length: PositiveInt
    beta_fast: PositiveFloat
    beta_slow: PositiveFloat
    truncate: bool
    mscale: float  # below 0 where turned heads become smaller
    mscale_all_dim: NonNegativeFloat

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.beta_slow > self.beta_fast:
            raise mistake(f"{self.beta_slow} is more than beta_fast={self.beta_fast}", "exchange them", "beta_slow")
        if self._m(self.mscale) <= 0:
            least = -10 / math.log(self.factor)
            raise mistake(f"{self.mscale} multiplies by less than 0", f"give more than {least:.3g}", "mscale")
        return self

    @property
    def factor_of_turned(self) -> float:
        return self._m(self.mscale) / self._m(self.mscale_all_dim)

    @property
    def factor_of_scores(self) -> float:
        return self._m(self.mscale_all_dim) ** 2

    def _m(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1


RopeScaling = Annotated[Llama3Scaling | LinearScaling | YarnScaling, Field(discriminator="kind")]


class DecoderBase(ModelConfig):
    """All decoders share these keys: those with one MLP in a layer, and those with experts (moe.py)."""

    family: Literal["decoder", "moe"]
    embed_dim: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt  # heads that share one key and value: num_heads / num_kv_heads
    head_dim: PositiveInt
    mlp_dim: PositiveInt  # the width of the MLP in a layer, or of each expert
    mlp: Literal["gated", "plain"]  # gated: (f(x gate) * (x up)) down; plain: f(x up) down
    mlp_activation: Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"]
    positions: Literal["rope", "learned"]
    rope_theta: PositiveFloat | None  # base of the rotary wavelengths
    rope_scaling: RopeScaling | None
    window_rope_theta: PositiveFloat | None  # the base in layers with a window, not stretched; None: as in others
    num_positions: PositiveInt | None  # rows of the table of learned positions: the longest sequence
    norm: NormKind
    norm_placement: Literal["before", "before_and_after"]  # where the norms of attention and MLP stand
    norm_epsilon: PositiveFloat
    qk_norm: Literal["none", "rms", "rms_zero_centered"]  # of each head's queries and keys, before they turn
    attention_scale: PositiveFloat | None  # the factor of scores; None: 1 / sqrt(head_dim)
    attention_windows: Annotated[
        tuple[PositiveInt | None, ...], Field(min_length=1)
    ]  # of one layer after the other, over and over; None: all tokens before
    attention_soft_cap: PositiveFloat | None
    attention_sinks: bool  # one more score of each head, a parameter, whose weight meets no value
    logit_soft_cap: PositiveFloat | None
    biases: Literal["none", "qkv", "all"]  # the biases of matrices; the head's has none
    embeddings: Literal["separate", "tied"]  # tied: the head multiplies with the embedding's table
    embedding_scale: Literal["one", "sqrt_embed_dim"]
    dropout_rate: Annotated[
        float, Field(ge=0, lt=1)
    ]  # applied to the embeddings and to each addition to the residual stream
    initializer_stddev: PositiveFloat  # for every matrix; the two that write to the residual stream: / sqrt(2 layers)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            what = f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            raise mistake(what, f"use one of {', '.join(map(str, divisors(self.num_heads)))}", "num_kv_heads")
        if self.mlp_activation == CLAMPED_SWIGLU and self.mlp != "gated":
            raise mistake("it is of gated MLPs alone", "use one of silu, gelu, gelu_tanh, relu", "mlp_activation")
        return self._check_positions()

    def _check_positions(self) -> Self:
        rope = {key: getattr(self, key) for key in ("rope_theta", "rope_scaling", "window_rope_theta")}
        learned = {"num_positions": self.num_positions}
        used, unused = (rope, learned) if self.positions == "rope" else (learned, rope)
        first = next(iter(used))
        if used[first] is None:
            raise mistake(f"positions={self.positions} needs it", f"set model.{first}=...", first)
        for key, value in unused.items():
            if value is not None:
                raise mistake(f"positions={self.positions} does not use it", f"set model.{key}=null", key)
        if self.window_rope_theta is not None and not any(self.attention_windows):
            raise mistake("no layer has a window", "set model.window_rope_theta=null", "window_rope_theta")
        if self.positions == "rope" and self.head_dim % 2:
            what = f"head_dim={self.head_dim} is odd, and rotary positions turn pairs of dimensions"
            raise mistake(what, f"use {self.head_dim + 1}", "head_dim")
        return self


class DecoderConfig(DecoderBase):
    family: Literal["decoder"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen, so it is never assigned)

    def build(self) -> "Model":
        from .decoder import build_decoder

        return build_decoder(self)  # pyright: ignore[reportArgumentType] (frozen, so pydantic gives it a hash)


class LatentAttentionConfig(Config):
    """The sizes of latent attention. `head_dim` of the decoder is the part of a head's query and key that has no
    position."""

    query_dim: PositiveInt | None  # the size of the vector that all heads' queries are made of; None: the input
    kv_dim: PositiveInt  # the size of the one that all heads' keys and values are made of
    rope_head_dim: PositiveInt  # the part of a head's query and key that rotary positions turn
    value_head_dim: PositiveInt


class MoeConfig(DecoderBase):
    family: Literal["moe"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen, so it is never assigned)
    num_experts: Annotated[int, Field(ge=2)]
    num_experts_per_token: PositiveInt
    num_shared_experts: NonNegativeInt  # the experts of every token besides its own: one MLP, as many times as wide
    num_dense_layers: NonNegativeInt  # the first layers, with one MLP and no experts
    dense_mlp_dim: PositiveInt | None  # the width of that MLP
    router_scores: Literal["softmax", "sigmoid"]
    router_weights: Literal["normalized", "scores"]  # normalized: those of a token's experts sum to router_scale
    router_scale: PositiveFloat
    num_expert_groups: PositiveInt  # a token chooses experts of its best groups alone
    num_groups_per_token: PositiveInt
    group_scores: Literal["best", "best_two"]  # a group's score: that of its best expert, or the sum of its two best
    router_jitter: Annotated[float, Field(ge=0, lt=1)]  # the router's input times 1 - jitter .. 1 + jitter, in training
    latent_attention: LatentAttentionConfig | None  # None: a decoder's attention
    load_balancing_weight: NonNegativeFloat  # times a loss that is 1 for an even spread
    # What that loss counts: the tokens of each microbatch, or those of the whole global batch of the step before.
    load_balancing_counts: Literal["microbatch", "global"]
    router_z_loss_weight: NonNegativeFloat  # the weight of the mean of log(sum exp(logits))^2
    router_bias_update_rate: NonNegativeFloat | None  # the step of a bias by which tokens choose experts; None: no bias

    def build(self) -> "Model":
        from .moe import build_moe

        return build_moe(self)  # pyright: ignore[reportArgumentType] (frozen)

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        experts, chosen, groups = self.num_experts, self.num_experts_per_token, self.num_expert_groups
        if experts % groups:
            what = f"num_experts={experts} is not a multiple of num_expert_groups={groups}"
            raise mistake(what, f"use one of {', '.join(map(str, divisors(experts)))}", "num_expert_groups")
        if self.num_groups_per_token > groups:
            what = f"a token chooses {self.num_groups_per_token} of {groups} groups"
            raise mistake(what, f"use {groups} or less", "num_groups_per_token")
        if chosen > (eligible := self.num_groups_per_token * experts // groups):
            what = f"a token chooses {chosen} of {eligible} experts"
            raise mistake(what, f"use {eligible} or less", "num_experts_per_token")
        return self._check_layers()

    def _check_layers(self) -> Self:
        if self.num_dense_layers >= self.num_layers:
            what = f"{self.num_dense_layers} of num_layers={self.num_layers} layers are dense: none has experts"
            raise mistake(what, f"use {self.num_layers - 1} or less, or model.family=decoder", "num_dense_layers")
        if self.num_dense_layers and self.dense_mlp_dim is None:
            raise mistake(f"num_dense_layers={self.num_dense_layers} needs it", "set it", "dense_mlp_dim")
        if not self.num_dense_layers and self.dense_mlp_dim is not None:
            raise mistake("num_dense_layers=0 does not use it", "set model.dense_mlp_dim=null", "dense_mlp_dim")
        for key, value, only in (("mlp", self.mlp, ("gated",)), ("biases", self.biases, ("none", "qkv", "all"))):
            if value not in only:
                raise mistake(f"{value} is not implemented for experts", f"use {' or '.join(only)}", key)
        if self.load_balancing_counts == "global" and not self.load_balancing_weight:
            fix = "set model.load_balancing_counts=microbatch, or give the loss a weight"
            raise mistake("load_balancing_weight=0 does not use it", fix, "load_balancing_counts")
        if self.latent_attention is not None:
            self._check_latent()
        if len(self.attention_windows) > 1 and self.num_dense_layers:
            what = "several in turn are not implemented beside dense layers"
            raise mistake(what, "give one window, or null", "attention_windows")
        if self.biases == "all" and (self.num_dense_layers or self.num_shared_experts):
            what = "all is not implemented beside dense layers and shared experts"
            raise mistake(what, "use none or qkv", "biases")
        return self

    def _check_latent(self) -> None:
        unused = {"num_kv_heads": self.num_heads, "positions": "rope", "qk_norm": "none", "biases": "none",
                  "attention_sinks": False}  # fmt: skip
        for key, value in unused.items():
            if getattr(self, key) != value:
                what = f"{getattr(self, key)} is not implemented for latent attention"
                raise mistake(what, f"set model.{key}={str(value).lower()}", key)
        assert self.latent_attention is not None
        if self.latent_attention.rope_head_dim % 2:
            what = f"rope_head_dim={self.latent_attention.rope_head_dim} is odd, and pairs of dimensions are turned"
            raise mistake(what, f"use {self.latent_attention.rope_head_dim + 1}", "latent_attention")


class LinearStackConfig(ModelConfig):
    family: Literal["linear_stack"]
    embed_dim: PositiveInt
    num_layers: PositiveInt

    def build(self) -> "Model":
        from .linear_stack import build_linear_stack

        return build_linear_stack(self)  # pyright: ignore[reportArgumentType] (frozen)


MODELS: tuple[type[ModelConfig], ...] = (DecoderConfig, LinearStackConfig, MoeConfig)
