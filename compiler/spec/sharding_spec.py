"""Declares the rules by which arrays are split over mesh axes."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from meshloom.models.config import Config, mistake

from ..core.config_types import NumBytes, Text
from .program_keys import ProgramKeys

# The axes that rules may name. Slowest link first: replicas across slices, tensor shards on neighbouring chips.
MeshAxis = Literal["replica", "data", "fsdp", "context", "expert", "tensor"]


def each_once(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the mesh axes. Raises a mistake where one comes twice."""
    if len(set(axes)) == len(axes):
        return axes
    raise mistake(f"{', '.join(axes)} names a mesh axis twice", "name it once")


class Rule(Config):
    """Dimensions with one of these logical axes are sharded over these mesh axes (none: replicated).

    alternatives: where the target's compiler handles shards of one of them badly, the dimensions of the array that may
    be sharded instead (docs/sharding.md).
    """

    logical: Annotated[tuple[Text, ...], Field(min_length=1)]
    mesh: Annotated[tuple[MeshAxis, ...], AfterValidator(each_once)]
    alternatives: tuple[Text, ...] = ()


class ShardingRules(ProgramKeys):
    """Ordered rules per kind of array: each dimension takes the first matching rule whose mesh axes are free.

    mesh_axes: the only mesh axes that rules split over; null: all that they name. optimizer: rules of optimizer state
    that is not laid out as its parameter; validation adds the parameters' rules for all other logical axes. gradients:
    the table by which gradients are laid out while they are accumulated. If the optimizer's splits more than the
    parameters', `parameters` sums whole gradients and splits them once per step (ZeRO-1), and `optimizer` splits each
    gradient as soon as it is computed (ZeRO-2).
    """

    mesh_axes: Annotated[tuple[MeshAxis, ...], AfterValidator(each_once)] | None = None
    parameters: tuple[Rule, ...]
    gradients: Literal["parameters", "optimizer"]
    optimizer: tuple[Rule, ...]  # optimizer state and master weights; never split less than the parameters
    activations: tuple[Rule, ...]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        parameters = rules_over(self.parameters, self.mesh_axes)
        optimizer = with_rules_of_others(rules_over(self.optimizer, self.mesh_axes), parameters)
        activations = rules_over(self.activations, self.mesh_axes)
        tables = {"parameters": parameters, "optimizer": optimizer, "activations": activations}
        return self.model_copy(update=tables)


def rules_over(rules: tuple[Rule, ...], mesh_axes: tuple[MeshAxis, ...] | None) -> tuple[Rule, ...]:
    """Returns a table of rules without other mesh axes; logical axes that no rule then splits are whole.

    [embed -> fsdp, expert; mlp -> tensor; layers -> whole] over (data, fsdp) is [embed -> fsdp; layers, mlp -> whole].
    """
    if mesh_axes is None:
        return rules
    kept: list[Rule] = []
    for rule in rules:
        mesh = tuple(axis for axis in rule.mesh if axis in mesh_axes)
        last = kept[-1] if kept else None
        if rule.mesh and not mesh:
            continue
        if (
            last
            and last.mesh == mesh
            and (mesh != rule.mesh or last not in rules or set(rule.logical) <= set(last.logical))
        ):  # what told them apart is left out
            kept[-1] = _of_these_too(last, rule.logical)
        else:
            kept.append(rule.model_copy(update={"mesh": mesh}))
    named = {name for rule in kept for name in rule.logical}
    whole = tuple(dict.fromkeys(name for rule in rules for name in rule.logical if name not in named))
    if whole:
        last = kept.pop() if kept and not kept[-1].mesh else Rule(logical=whole, mesh=())
        kept.append(_of_these_too(last, whole))
    return tuple(kept)


def _of_these_too(rule: Rule, logical: tuple[str, ...]) -> Rule:
    return rule.model_copy(update={"logical": tuple(dict.fromkeys((*rule.logical, *logical)))})


def with_rules_of_others(rules: tuple[Rule, ...], others: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Returns the rules, and after them those of other logical axes: [embed -> data] and [embed, mlp -> whole] are
    [embed -> data; mlp -> whole]."""
    if not rules:
        return others
    named = {name for rule in rules for name in rule.logical}
    left = [(rule, tuple(name for name in rule.logical if name not in named)) for rule in others]
    return (*rules, *(rule.model_copy(update={"logical": names}) for rule, names in left if names))


class ShardingSpec(ShardingRules):
    """Rules, and the limit on arrays that they replicate."""

    replicated_bytes_threshold: NumBytes  # the largest parameter, or its state, that may be replicated on every device
    on_replicated: Literal["error", "warn", "allow"]  # if one is larger
