"""The operations that the plan decides on, in this order: one that is planned from others comes after them."""

from .attention.attention import AttentionOp
from .attention.context import ContextOp
from .embedding import EmbeddingOp
from .experts.experts import ExpertsOp
from .lm_head import LmHeadOp
from .loss import LossOp
from .matmul import MatmulOp
from .operation import ParallelOp

OPERATIONS: tuple[ParallelOp, ...] = (
    EmbeddingOp(), ContextOp(), AttentionOp(), MatmulOp(), ExpertsOp(), LossOp(), LmHeadOp(),
)  # fmt: skip
