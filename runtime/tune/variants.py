"""Composes the variants of a request, one for each combination of options of the searched groups.

The winner becomes a file of the config group `experiment`, ready to run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any
from meshloom.compiler.declare.choices import as_config_file
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.compositions import compositions_kept
from meshloom.compiler.declare.overrides import parse_override
from meshloom.compiler.spec.plan_spec import PlanSpec
from meshloom.compiler.tune.answer import Estimated
from meshloom.compiler.tune.space import GroupChoices, Variant, check_pins, num_points, product_of

from ..core.files import replace_text


@dataclass(frozen=True)
class Space:
    """The space of a request.

    request: the request without pins. pinned: the pins, as `tune.pin` holds them. groups: the options of each config
    group. choices: all combinations of options. variants: one for each combination; none if the space is too large to
    list. pins: the overrides that are not searched, as typed. about_num_candidates: the number of candidates before the
    rules, as if every variant had as many as the first.
    """

    request: Request
    spec: PlanSpec
    pinned: Mapping[str, Any]
    groups: Mapping[str, tuple[str, ...]]
    choices: tuple[GroupChoices, ...]
    variants: tuple[Variant, ...]
    pins: tuple[str, ...]
    about_num_candidates: int

    @property
    def is_listed(self) -> bool:
        """Returns True if all variants are searched."""
        return bool(self.variants)

    def variant(self, choices: GroupChoices) -> Variant:
        """Returns the variant of these options. Raises ConfigError if Hydra cannot compose it."""
        return _variant(self.request, choices, self.pinned)


def find_space(request: Request) -> Space:
    """Returns the space of a request. Raises ConfigError with all of its problems.

    A key that the user types is not searched: `remat=full`, `mesh.tensor=8` and `num_microbatches=1` are pins, like the
    keys of tune.pin.
    """
    declared = read_spec(request, then=lambda spec: spec)
    groups = dict(declared.tune.groups)
    typed = _typed_pins(request, groups)
    pinned = _joined(declared.tune.pin, typed)
    check_pins(pinned, tuple(groups))
    options = {group: (str(pinned[group]),) if group in pinned else found for group, found in groups.items()}
    kept = tuple(text for text in request.overrides if not _is_pin(text, groups))
    plain = replace(request, overrides=kept)
    every = tuple(product_of(options))
    with compositions_kept():
        first = _variant(plain, every[0], pinned)
        about = num_points(first) * len(every)
        is_listed = about <= declared.tune.max_candidates or len(every) == 1
        variants = (first, *(_variant(plain, choices, pinned) for choices in every[1:])) if is_listed else ()
    pins = tuple(text for text in request.overrides if _is_pin(text, groups))
    return Space(plain, first.spec, pinned, options, every, variants, pins, about)


def _variant(request: Request, choices: GroupChoices, pinned: Mapping[str, Any]) -> Variant:
    words = tuple(f"{group}={option}" for group, option in choices)
    try:
        spec = read_spec(replace(request, overrides=(*request.overrides, *words)), then=lambda spec: spec)
    except ConfigError as error:
        raise ConfigError([replace(each, where=f"tune.groups: {' '.join(words)}: {each.where}")
                           for each in error.problems]) from error  # fmt: skip
    return Variant(choices, spec.model_copy(update={"tune": spec.tune.model_copy(update={"pin": dict(pinned)})}))


def _is_pin(text: str, groups: Mapping[str, Sequence[str]]) -> bool:
    key = parse_override(text).key_or_group
    return key in groups or key == "num_microbatches" or key.startswith("mesh.")


def _typed_pins(request: Request, groups: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Returns the pins of the request, in the form of `tune.pin`."""
    found: dict[str, Any] = {}
    problems = []
    for text in request.overrides:
        parsed = parse_override(text)
        key, value = parsed.key_or_group, parsed.value()
        if key == "mesh":
            problems.append(Problem("mesh", "the mesh is searched", "pin an axis of it: mesh.tensor=8"))
        elif key.startswith("mesh."):
            if value == -1:
                problems.append(Problem(key, "-1 pins nothing", "leave it out, or give a size"))
            found.setdefault("mesh", {})[key.removeprefix("mesh.")] = value
        elif key in groups or key == "num_microbatches":
            found[key] = value
    raise_if_any(problems)
    return found


def _joined(pinned: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    mesh = {**dict(pinned.get("mesh", {})), **typed.get("mesh", {})}
    return {**pinned, **typed, **({"mesh": mesh} if mesh else {})}


def write_experiment(space: Space, winner: Estimated, path: Path, why: str) -> None:
    """Writes the declaration of the winner: the typed overrides, and the searched ones."""
    typed = [text for text in space.request.overrides if not text.startswith(("hydra.", "tune."))]
    searched = [f"{key}={value}" for key, value in winner.candidate.values.items()]
    groups, values = as_config_file(space.request, [*typed, *searched])
    text = "# @package _global_\n" + "".join(f"# {line}\n" for line in why.splitlines())
    text += yaml.safe_dump({"defaults": groups}, sort_keys=False) + yaml.safe_dump(values, sort_keys=False)
    replace_text(path, text)
