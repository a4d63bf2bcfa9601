"""Reads how rows are written on their way to experts: `precision.dispatch` and `precision.dispatch_gradients`."""

from collections.abc import Iterator, Sequence

from ...core.errors import Problem, use_one_of
from ...formats.operands import OperandFormat, operand_formats
from ..operation import OpInputs
from .transfer import RowTypes

TOKENS, GRADIENTS = "precision.dispatch", "precision.dispatch_gradients"


def row_types(inputs: OpInputs) -> RowTypes:
    """Returns the declared types; as the rows are, where there is no such type."""
    declared, formats = inputs.spec.precision, _formats()
    return RowTypes(formats.get(declared.dispatch or ""), formats.get(declared.dispatch_gradients or ""))


def _formats() -> dict[str, OperandFormat]:
    """Returns the types of rows, by name: one for each type of elements, since a row has one scale in any case."""
    by_element = dict[str, OperandFormat]()
    for each in operand_formats().values():
        by_element.setdefault(each.element, each)
    return {each.name: each for each in by_element.values()}


def row_type_problems(inputs: OpInputs, *, has_experts: bool, has_exchange: bool) -> Sequence[Problem]:
    """Returns the mistakes in the types. has_exchange: some experts are on other devices."""
    declared = inputs.spec.precision
    named = {TOKENS: declared.dispatch, GRADIENTS: declared.dispatch_gradients}
    return [
        problem
        for key, name in named.items()
        if name is not None
        for problem in _problems(key, name, inputs, has_experts=has_experts, has_exchange=has_exchange)
    ]


def _problems(key: str, name: str, inputs: OpInputs, *, has_experts: bool, has_exchange: bool) -> Iterator[Problem]:
    if name not in _formats():
        yield Problem(key, f"'{name}' is not a type in which tokens are sent", use_one_of(name, _formats()))
    elif not has_experts:
        yield Problem(key, "the model has no experts", f"set {key}=null, or choose a model with experts")
    elif not has_exchange and not inputs.spec.precision.emulate:  # which rounds on one device as on many
        what = "every device has all experts, so no token is sent to another one"
        yield Problem(key, what, f"set {key}=null, or split the experts: sharding=fsdp_expert mesh.expert=N")
