"""The numbers of the cost model that chips share, read from conf/calibration/_cost_model.yaml, which has their sources.

Those of a chip are in its own file (conf/target).
"""

from functools import cache

from pydantic import PositiveFloat, PositiveInt

from meshloom.models.record import Record

from ..core.config_types import UpToOne
from .figure_source import FigureSource
from .own_config import own_config


class CostModel(Record):
    """The numbers of the cost model.

    kernel_seconds: the shortest GPU kernel. kernel_gap_seconds: from the end of a kernel to the start of the next.
    negligible_bytes: arrays of at most this size take no time on TPUs.
    interleaved_bytes: a collective of at most this size does not wait in line for the links of a torus.
    pass_seconds: what a pass over memory takes on TPUs besides its bytes at the whole bandwidth.
    matmul_seconds: what a matmul takes on TPUs besides its arithmetic.
    sending_matmul: how much longer a matmul takes from within which a TPU sends the chunks of a collective.
    exposed_beside_matmuls: the share of tensor parallelism's collectives that is waited for where they run beside
        matmuls.
    exposed_ring_permutes: the share of a ring's permutes that is waited for beside attention.
    ring_attention_bytes: moved by a step of ring attention, forward and backward, for each element of the queries.
    ordered_bytes_tpu, ordered_bytes: moved to put a byte of gathered tokens in the order of the sequence, on TPUs and
        elsewhere.
    ring_matmul_passes: passes over a shard for each sum of a ring of matmuls.
    head_chunk_passes: passes over the head's input for each further part of the vocabulary.
    head_largest_part: the largest share of the vocabulary in one part of the head.
    unnamed_mask_share: the share of the square that attention computes whose mask the program does not name.
    attention_backward: FLOPs of attention's backward pass over those of its forward pass.
    head_passes: times that the head's matmul runs, forward and backward.
    copy_passes: times that a copied array crosses the memory.
    left_to_weight_gradients: what a pipeline's B leaves to W of a layer that is not computed again, over what the layer
        makes.
    usual_imbalance: the room for experts that a balanced router needs, over the mean.
    """

    kernel_seconds: PositiveFloat
    kernel_gap_seconds: PositiveFloat
    negligible_bytes: PositiveInt
    interleaved_bytes: PositiveInt
    pass_seconds: PositiveFloat
    matmul_seconds: PositiveFloat
    sending_matmul: PositiveFloat
    exposed_beside_matmuls: UpToOne
    exposed_ring_permutes: UpToOne
    ring_attention_bytes: PositiveInt
    ordered_bytes_tpu: PositiveInt
    ordered_bytes: PositiveInt
    ring_matmul_passes: PositiveInt
    head_chunk_passes: PositiveInt
    head_largest_part: UpToOne
    unnamed_mask_share: UpToOne
    attention_backward: PositiveFloat
    head_passes: PositiveInt
    copy_passes: PositiveInt
    left_to_weight_gradients: UpToOne
    usual_imbalance: PositiveFloat


class Sourced(Record):
    """A number of the file, and where it comes from."""

    value: float | int
    source: FigureSource


@cache
def cost_model() -> CostModel:
    """Returns the numbers of the cost model."""
    return CostModel.model_validate({name: each.value for name, each in sourced_numbers().items()})


@cache
def sourced_numbers() -> dict[str, Sourced]:
    """Returns the file's contents: each number with its source."""
    return {name: Sourced(**each) for name, each in own_config("calibration/_cost_model.yaml").items()}
