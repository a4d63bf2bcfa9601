"""Classes from a user's own package in a declaration, chosen by import path as Meshloom's are chosen by name.

    model: {family: decoder, ...}                         one of ours
    model: {family: "my_package.models:MyConfig", ...}    theirs: its fields become the keys of the node, as checked

compiler/core/user_code.py imports them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

from pydantic import Field, create_model

from meshloom.models import ModelConfig
from meshloom.models.config import Config
from meshloom.models.family_configs import MODELS

from ..core.errors import ConfigError, Problem
from ..core.user_code import blamed_on_user, load_class
from ..optim.configs import OPTIMIZERS, SCHEDULES, OptimizerConfig, ScheduleConfig
from .run_spec import RunSpec


@dataclass(frozen=True)
class ExtensionPoint:
    """A node of the spec whose class the declaration names. key: the key that names it. base: its required base class.
    ours: the registered classes, each with its name as the only value of the key."""

    node: str
    key: str
    base: type[Config]
    ours: tuple[type[Config], ...]

    @property
    def where(self) -> str:
        return f"{self.node}.{self.key}"

    def field(self, *theirs: type[Config]) -> Any:
        """Returns the field's type: one of the registered classes and `theirs`, told apart by the key."""
        return Annotated[Union[*self.ours, *theirs], Field(discriminator=self.key)]


EXTENSION_POINTS = (
    ExtensionPoint("model", "family", ModelConfig, MODELS),
    ExtensionPoint("optimizer", "name", OptimizerConfig, OPTIMIZERS),
    ExtensionPoint("schedule", "kind", ScheduleConfig, SCHEDULES),
)
_FIELDS: dict[str, Any] = {point.node: (point.field(), ...) for point in EXTENSION_POINTS}

# The declaration of a run that names registered classes alone.
DeclaredRun: type[RunSpec] = create_model("DeclaredRun", __base__=RunSpec, __module__=__name__, **_FIELDS)


def spec_class(values: Mapping[str, Any]) -> tuple[type[RunSpec], list[Problem]]:
    """Returns DeclaredRun, extended with the users' classes that `values` name. A node whose class cannot be loaded is
    a problem, and is not checked."""
    nodes: dict[str, Any] = {}
    problems: list[Problem] = []
    for point in EXTENSION_POINTS:
        node = values.get(point.node)
        path = node.get(point.key) if isinstance(node, Mapping) else None
        if not isinstance(path, str) or ":" not in path:
            continue
        try:
            tag: dict[str, Any] = {point.key: (Literal[path], ...)}
            loaded = load_class(path, point.where, point.base)
            with blamed_on_user(point.where, f"reading the fields of {path}", is_theirs=True):
                loaded.model_rebuild()  # `Record` puts it off
            theirs = create_model(path, __base__=loaded, **tag)
        except ConfigError as error:
            problems += error.problems
            nodes[point.node] = (Any, ...)
            continue
        nodes[point.node] = (point.field(theirs), ...)
    return (create_model("DeclaredRun", __base__=DeclaredRun, **nodes) if nodes else DeclaredRun), problems
