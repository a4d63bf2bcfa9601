"""Objectives as declared: what a step minimises."""

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, NonNegativeFloat, PositiveFloat

from meshloom.models.config import Config


class ObjectiveBase(Config):
    """All objectives have this base.

    compares_pairs: sequences 2i and 2i + 1 of a batch are a chosen and a rejected one. task: what a run with it is for,
    whatever else it declares; None: its weights say that.
    """

    compares_pairs: ClassVar[bool] = False
    task: ClassVar[Literal["preferences"] | None] = None


class NextToken(ObjectiveBase):
    """The mean cross-entropy of the targets of a batch."""

    kind: Literal["next_token"]


class Dpo(ObjectiveBase):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, equation 7), with label smoothing
    (conservative DPO: Mitchell 2023)."""

    compares_pairs = True
    task = "preferences"
    kind: Literal["dpo"]
    beta: PositiveFloat
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)]  # the share of pairs with exchanged labels


class Simpo(ObjectiveBase):
    """Simple preference optimization (Meng et al. 2024, arXiv:2405.14734, equation 6). It needs no reference."""

    compares_pairs = True
    task = "preferences"
    kind: Literal["simpo"]
    beta: PositiveFloat
    margin: NonNegativeFloat  # gamma of the paper


OBJECTIVES: tuple[type[ObjectiveBase], ...] = (NextToken, Dpo, Simpo)
ObjectiveSpec = Annotated[NextToken | Dpo | Simpo, Field(discriminator="kind")]


def task_of_objective(kind: str | None) -> Literal["preferences"] | None:
    """Returns what a run with an objective is for, by the name of the objective."""
    for each in OBJECTIVES:
        if kind in get_args(each.model_fields["kind"].annotation):
            return each.task
    return None
