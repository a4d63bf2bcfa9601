"""What a declared number or text may be: every field of every class of the spec is walked."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import jax
import numpy as np
import pytest
from pydantic import Field, TypeAdapter, ValidationError

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.declare.sections import GenerateSpec
from meshloom.compiler.optim.contract import OptimizerConfig
from meshloom.models.config import Config, divisors


def _classes(of: type[Config] = Config) -> Iterator[type[Config]]:
    """All classes of declarations."""
    for one in of.__subclasses__():
        if one.__module__.startswith("meshloom.") and one.__module__ != "meshloom.compiler.schema":
            yield one
            yield from _classes(one)


def _kinds(annotation: Any) -> set[Any]:
    """The types that a value of a field, or an element of its list, may have."""
    if get_origin(annotation) in (dict, Literal):
        return set()
    parts = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return {annotation} if not parts else {kind for part in parts for kind in _kinds(part)}


def _fields(kind: type) -> list[Any]:
    names = [
        pytest.param(one, name, id=f"{one.__name__}.{name}")
        for one in dict.fromkeys(_classes())
        for name, field in one.model_fields.items()
        if kind in _kinds(field.annotation) and name in one.__annotations__
    ]
    assert len(names) > 15
    return names


def _is_refused(one: type[Config], name: str, value: Any) -> bool:
    """True where the class refuses the value for this field; all others are missing."""
    value = [value] if get_origin(one.model_fields[name].annotation) is tuple else value
    with pytest.raises(ValidationError) as caught:
        one.model_validate_json(json.dumps({name: value, "no_such_key": 1}))
    return any(error["loc"][:1] == (name,) for error in caught.value.errors(include_url=False))


def _is_declared(declared: TypeAdapter[Any], value: float) -> bool:
    """True where pydantic alone takes the value for what the field is declared as."""
    try:
        declared.validate_python(value)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(("one", "name"), _fields(float))
def test_a_float_keeps_in_float32_what_is_declared_of_it(one, name):
    declared = TypeAdapter(one.model_fields[name].rebuild_annotation())
    tested = (0.0, 1e-60, -1e-60, 1e-39, 1e-37, 0.25, 0.9999999, 0.99999999, 1.0, 1.00000001, 2.0, 1e37, 1e39, 1e300)
    for value in tested:
        with np.errstate(over="ignore"):
            held = float(np.float32(value))
        is_lost = not np.isfinite(held) or (value != 0 and abs(held) < np.finfo(np.float32).smallest_normal)
        is_wrong = not _is_declared(declared, value) or not _is_declared(declared, held)
        assert _is_refused(one, name, value) == (is_lost or is_wrong), value


@pytest.mark.parametrize(("one", "name"), _fields(int))
def test_an_int_has_bounds(one, name):
    for value in (2**63, 10**30, -(10**30)):
        assert _is_refused(one, name, value), value


# A prompt, and what ends a completion, may be any text.
ANY_TEXT = [(GenerateSpec, "prompt"), (GenerateSpec, "chat"), (GenerateSpec, "stop")]


@pytest.mark.parametrize(("one", "name"), [each for each in _fields(str) if tuple(each.values) not in ANY_TEXT])
def test_a_text_is_not_empty_and_fits_into_a_path(one, name):
    for value in ("", "a\0b", "\x1b[31m"):
        assert _is_refused(one, name, value), value


def test_the_largest_seed_is_the_last_that_makes_a_key_of_its_own():
    keys = [np.asarray(jax.random.key_data(jax.random.key(seed))) for seed in (0, 1, 2**31, 2**32 - 2, 2**32 - 1)]
    assert len({key.tobytes() for key in keys}) == len(keys)
    assert not _is_refused(RunSpec, "seed", 2**32 - 1)
    assert _is_refused(RunSpec, "seed", 2**32)


def test_the_classes_of_users_are_checked_too():
    class Mine(OptimizerConfig):
        momentum: Annotated[float, Field(lt=1)] | None
        num_parts: int
        num_bytes: Annotated[int, Field(le=2**40)]

    assert _is_refused(Mine, "momentum", 0.99999999)
    assert _is_refused(Mine, "num_parts", 2**31)
    assert not _is_refused(Mine, "num_bytes", 2**40)


def test_an_error_shows_the_value_in_float32_and_the_nearest_that_works():
    with pytest.raises(ConfigError) as caught:
        read_spec(Request(("optimizer.b2=0.99999999",)), then=lambda spec: spec)
    assert str(caught.value) == ("error: optimizer.b2: 0.99999999 is 1.0 in float32\n  fix: give at most 0.99999994")
    assert np.float32("0.99999994") == np.nextafter(np.float32(1), np.float32(0))


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 2**20])
def test_divisors_are_all_of_them(number):
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
