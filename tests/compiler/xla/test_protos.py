"""Programs in protocol buffers have the text that their compiler printed, whichever fields hold their groups."""

import re
from collections.abc import Mapping

import pytest
from jaxlib._hlo import hlo_module_from_text

from meshloom.compiler.core.wire import message_fields
from meshloom.compiler.xla.hlo import HloError, parse_module
from meshloom.compiler.xla.hlo.groups import groups_of
from meshloom.compiler.xla.protos import proto_text
from support.traces import field

TEXT = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0), sharding={devices=[8]<=[8]}
  %listed = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=%sum
  ROOT %formula = f32[8]{0} all-reduce(%listed), channel_id=2, replica_groups=[2,4]<=[4,2]T(1,0), use_global_device_ids=true, to_apply=%sum
}
"""  # noqa: E501
GROUPS = {"listed": ((0, 1, 2, 3), (4, 5, 6, 7)), "formula": ((0, 2, 4, 6), (1, 3, 5, 7))}
LISTED, FORMULA, OLD = 87, 92, 49  # fields of groups: in a list, by a formula, and before there was a message for both
ASSIGNMENT = 15


def _message() -> bytes:
    return hlo_module_from_text(TEXT).as_serialized_hlo_module_proto()


def _rewritten(message: bytes, path: tuple[int, ...], change: Mapping[int, tuple[int, bytes] | None]) -> bytes:
    """Writes a message again with fields of the messages at a path changed: to another number and content, or left
    out."""
    written = b""
    for number, value in message_fields(message):
        content = value if isinstance(value, int) else bytes(value)
        if path and number == path[0] and isinstance(content, bytes):
            content = _rewritten(content, path[1:], change)
        if not path and number in change:
            new = change[number]
            written += field(*new) if new else b""
            continue
        written += field(number, content)
    return written


def _groups(text: str) -> dict[str, object]:
    module = parse_module(text)
    found = {each.name: each for each in module.entry_computation.instructions if each.opcode == "all-reduce"}
    return {name: groups_of(each, module.num_devices) for name, each in found.items()}


@pytest.mark.parametrize("wrap", [lambda module: module, lambda module: field(1, module)], ids=["module", "HloProto"])
def test_a_message_has_the_groups_and_the_devices_of_its_text(wrap):
    text = proto_text(wrap(_message()))
    assert parse_module(text).num_devices == 8
    assert _groups(text) == GROUPS == _groups(TEXT)


@pytest.mark.parametrize(
    "change",
    [
        {LISTED: (OLD, field(1, 0) + field(1, 1))},
        {LISTED: (LISTED, field(2, field(1, 4) + field(2, 2) + field(3, 8) + field(4, 0)))},
    ],
    ids=["before lists", "a formula within a list"],
)
def test_groups_in_fields_of_other_versions_are_read(change):
    """jaxlib prints none or all devices for these; the groups are pairs."""
    text = proto_text(_rewritten(_message(), (3, 2), change))
    first = _groups(text)["listed"]
    assert isinstance(first, tuple)
    assert first[0] == (0, 1)


def test_devices_are_counted_where_no_assignment_names_them():
    """By the shardings of its arguments, and by its groups where it has no sharding."""
    bare = _rewritten(_message(), (), {ASSIGNMENT: None})
    assert parse_module(proto_text(bare)).num_devices == 8
    without = _rewritten(bare, (3, 2), {40: None})
    assert parse_module(proto_text(without)).num_devices == 8
    replicas = b"".join(field(3, field(1, each) + field(1, each + 4)) for each in range(4))
    assigned = bare + field(ASSIGNMENT, field(1, 2) + field(2, 4) + replicas)
    header = proto_text(assigned).partition("\n")[0]
    assert re.search(r"replica_count=2, num_partitions=4", header)


@pytest.mark.parametrize("content", [b"", b"\x0a", _message()[:-20], b"HloModule f", field(1, "text")])
def test_other_bytes_are_refused(content):
    with pytest.raises(HloError):
        proto_text(content)
