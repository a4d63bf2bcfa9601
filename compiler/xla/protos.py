"""Reads the text of a program out of its protocol buffer, as dumps (`*.hlo.pb`) and profiles have it.

    HloProto { HloModuleProto, buffer assignment }, or HloModuleProto  ->  HloModule jit_step, is_scheduled=true, ...

jaxlib prints the module. Two facts are not in what it prints, and are read from the message: the numbers of replicas
and partitions, which are in no field of a module but its device assignment; and, of messages that compilers of other
versions wrote, the groups of devices of a collective.
"""

import math
import re
from collections.abc import Iterator, Mapping

from ..core.wire import WireError, first_text, integers, message_fields, submessages
from ..jax_private import hlo_library
from .hlo import HloError, Module, parse_module
from .hlo.groups import groups_of

# Fields of HloProto, HloModuleProto, HloComputationProto and HloInstructionProto (xla/service/hlo.proto), and of
# OpSharding and the messages of groups (xla/xla_data.proto).
_MODULE = 1
_NAME, _ENTRY_NAME, _COMPUTATIONS, _SHARDINGS, _OUTPUT_SHARDING, _ASSIGNMENT = 1, 2, 3, 14, 12, 15
_INSTRUCTIONS, _INSTRUCTION_SHARDING = 2, 40
_OLD_GROUPS, _LISTED_GROUPS, _IOTA_GROUPS = 49, 87, 92
_TILE_SIZES, _TILE_DEVICES, _PARTS = 3, 4, 5
_ANY = 2**31  # devices, where their number is not known yet
_NO_GROUPS = "replica_groups={}"
_HEADER = re.compile(r"^HloModule [^\n,]+(?:, is_scheduled=true)?")
_NAMED = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")


def module_message(data: bytes | memoryview) -> memoryview:
    """Returns the HloModuleProto in an HloProto; of an HloModuleProto, itself. Raises WireError for other bytes."""
    numbers = {number for number, value in message_fields(data) if not isinstance(value, int)}
    if {_NAME, _COMPUTATIONS} <= numbers and (_ENTRY_NAME in numbers):
        return memoryview(data)
    inner = next(submessages(data, _MODULE), None)
    if inner is None or not any(True for _ in submessages(inner, _COMPUTATIONS)):
        raise WireError("it holds no program")
    return inner


def proto_text(data: bytes | memoryview) -> str:
    """Returns the text of the program in an HloProto or an HloModuleProto, as `compiled.as_text()` has it. Raises
    HloError for bytes that are neither."""
    try:
        message = module_message(data)
        groups = dict(_groups(message))
        counted = _counts(message)
    except WireError as error:
        raise HloError(f"this is not a whole HloProto: {error}") from None
    try:
        text: str = hlo_library.HloModule.from_serialized_hlo_module_proto(bytes(message)).to_string()
    except Exception as error:  # jaxlib raises its own class of errors for each reason
        raise HloError(f"jaxlib cannot read the HloProto: {str(error).splitlines()[0]}") from None
    text = _with_groups(text, groups)
    if "num_partitions=" in text.partition("\n")[0]:
        return text
    replicas, partitions = counted or (1, _num_partitions(message, parse_module(text)))
    numbers = f", replica_count={replicas}" if replicas > 1 else ""
    numbers += f", num_partitions={partitions}" if partitions > 1 else ""
    return _HEADER.sub(lambda found: found[0] + numbers, text, count=1)


def _groups(module: memoryview) -> Iterator[tuple[str, str]]:
    """Yields the groups of each collective as text, in whichever field they are."""
    for computation in submessages(module, _COMPUTATIONS):
        for instruction in submessages(computation, _INSTRUCTIONS):
            listed = next(submessages(instruction, _LISTED_GROUPS), memoryview(b""))
            places = (
                (submessages(instruction, _OLD_GROUPS), submessages(instruction, _IOTA_GROUPS)),
                (submessages(listed, 1), submessages(listed, 2)),
            )
            for explicit, iota in places:
                text = ",".join("{" + ",".join(map(str, integers(each, 1))) + "}" for each in explicit)
                text = f"{{{text}}}" if text else next((_iota(each) for each in iota), "")
                if text:
                    yield first_text(instruction, 1), text
                    break


def _iota(message: memoryview) -> str:
    """Returns groups by a formula as text: [2,4]<=[4,2]T(1,0)."""
    sizes = [next(integers(message, number), 0) for number in (1, 2)]
    dims, order = list(integers(message, 3)), list(integers(message, 4))
    turned = f"T({','.join(map(str, order))})" if order != sorted(order) else ""
    return f"[{sizes[0]},{sizes[1]}]<=[{','.join(map(str, dims))}]{turned}"


def _with_groups(text: str, groups: Mapping[str, str]) -> str:
    """Returns the text with the groups of the collectives that are printed without."""
    if _NO_GROUPS not in text:
        return text
    lines = text.split("\n")
    for place, line in enumerate(lines):
        if _NO_GROUPS in line and (name := _NAMED.match(line)) and name[1] in groups:
            lines[place] = line.replace(_NO_GROUPS, f"replica_groups={groups[name[1]]}", 1)
    return "\n".join(lines)


def _counts(module: memoryview) -> tuple[int, int] | None:
    """Returns the numbers of replicas and of partitions by the device assignment; None if the module has none."""
    for assignment in submessages(module, _ASSIGNMENT):
        replicas, partitions = (next(integers(assignment, number), 0) for number in (1, 2))
        if replicas and partitions:
            return replicas, partitions
    return None


def _num_partitions(message: memoryview, module: Module) -> int:
    """Returns the number of devices that shardings and groups of collectives name."""
    sizes = [_num_sharded(each) for number in (_SHARDINGS, _OUTPUT_SHARDING) for each in submessages(message, number)]
    for computation in submessages(message, _COMPUTATIONS):
        for instruction in submessages(computation, _INSTRUCTIONS):
            sizes += [_num_sharded(each) for each in submessages(instruction, _INSTRUCTION_SHARDING)]
    for computation in module.computations.values():
        for each in computation.instructions:
            text = each.attribute("replica_groups") or each.attribute("source_target_pairs") or ""
            if any(map(str.isdigit, text)):
                sizes += [device + 1 for group in groups_of(each, _ANY) or () for device in group]
    return max(sizes, default=1)


def _num_sharded(sharding: memoryview) -> int:
    """Returns the number of devices of an OpSharding; 1 if it names none."""
    parts = [_num_sharded(each) for each in submessages(sharding, _PARTS)]
    listed = [device + 1 for device in integers(sharding, _TILE_DEVICES)]
    return max([*parts, *listed, math.prod(integers(sharding, _TILE_SIZES))])
