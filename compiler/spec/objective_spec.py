"""Objectives as declared: what a step minimises."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from meshloom.models.config import Config


class NextToken(Config):
    """The mean cross-entropy of the targets of a batch."""

    kind: Literal["next_token"]


class Dpo(Config):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, equation 7), with label smoothing
    (conservative DPO: Mitchell 2023)."""

    kind: Literal["dpo"]
    beta: PositiveFloat
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)]  # the share of pairs with exchanged labels


class Simpo(Config):
    """Simple preference optimization (Meng et al. 2024, arXiv:2405.14734, equation 6). It needs no reference."""

    kind: Literal["simpo"]
    beta: PositiveFloat
    margin: NonNegativeFloat  # gamma of the paper


ObjectiveSpec = Annotated[NextToken | Dpo | Simpo, Field(discriminator="kind")]


def compares_pairs(objective: NextToken | Dpo | Simpo) -> bool:
    """Returns True for an objective of pairs: sequences 2i and 2i + 1 of a batch are the chosen and the rejected
    one."""
    return objective.kind != "next_token"
