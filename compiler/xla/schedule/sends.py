"""Reads sends and receives: on TPUs collectives across slices, by way of the hosts; on GPUs pairs of devices.

    send(%x, %t), frontend_attributes={..., _xla_host_transfer_rendezvous="psum.99_0",
      _xla_megascale_target="{1,2}x{0:7}", _xla_megascale_transfer_type="ALL_REDUCE"}

is an all-reduce between two slices, of each of their devices 0 to 7 with its like, over when it is received.

    _xla_megascale_target={{100000->200000},{100001->200001}}, _xla_megascale_transfer_type="ONE_TO_ONE"

is what device 0 of the first slice sends to device 0 of the second, and device 1 to device 1; of an ALL_TO_ALL,
{{100000,100001,200000,200001}} is a group. Such a program is that of one slice, which all of them run: it has as many
partitions as a slice has devices. In the groups of sends, the devices of a slice come after those of the slice before.
"""

import re

from ...core.collectives import MOVING, CollectiveKind
from ..hlo import Computation, Instruction
from ..hlo.groups import ReplicaGroups, parse_groups
from .steps import Collective

_TARGET = re.compile(r'_xla_megascale_target="\{([\d,]+)\}x')
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_KINDS: dict[str, CollectiveKind] = {
    "ALL_GATHER": "all-gather", "ALL_REDUCE": "all-reduce", "ALL_TO_ALL": "all-to-all",
    "REDUCE_SCATTER": "reduce-scatter",
}  # fmt: skip
_DEVICES = re.compile(r"_xla_megascale_target=\{((?:\{[\d,>-]+\},?)+)\}")
_SLICE = 100_000  # slice n has the devices from n x 100,000 on; slices are counted from 1
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_PAIRS = re.compile(r'_xla_send_recv_source_target_pairs="?(\{\{[\d,{}\s]*\}\})')


def begun_by(send: Instruction, around: Computation, num_devices: int) -> Collective:
    """Returns the transfer that a send begins."""
    text = send.attributes
    target, transfer, pairs = (form.search(text) for form in (_TARGET, _TRANSFER, _PAIRS))
    groups = parse_groups(pairs[1], num_devices) if pairs else _named_devices(text, num_devices)
    kind = _KINDS.get(transfer[1]) if transfer and (target or groups) else None
    num_slices = len(target[1].split(",")) if target and kind else None
    source = around.by_name.get(send.operands[0])
    arrays = source.arrays if source is not None else ()
    num_parts = num_slices or (len(groups[0]) if groups else 1)
    times = num_parts if kind in MOVING else 1  # the operand is one part
    return Collective(
        name=send.name,
        kind=kind or "send",
        num_bytes=times * sum(array.num_bytes for array in arrays),
        num_elements=tuple(times * array.num_elements for array in arrays),
        dtype=arrays[0].dtype if arrays else "",
        groups=groups,
        is_async=True,
        form="send",
        op_name=send.op_name,
        computation=around.name,
        num_slices=num_slices,
        is_certain=bool((num_slices or groups) and arrays),
    )


def _named_devices(text: str, num_devices: int) -> ReplicaGroups:
    """Returns groups of devices that are named one by one. num_devices: those of the program, which is of one slice."""
    found = _DEVICES.search(text)
    if found is None:
        return ()
    groups = [[int(device) for device in re.findall(r"\d+", group)] for group in re.findall(r"\{([^{}]+)\}", found[1])]
    return tuple(tuple((each // _SLICE - 1) * num_devices + each % _SLICE for each in group) for group in groups)


def is_answered(send: str, around: Computation) -> bool:
    """Returns True where something that is received ends this send."""
    return any(send in answered_by(each, around) for each in around.instructions if each.opcode == "recv-done")


def answered_by(done: Instruction, around: Computation) -> list[str]:
    """Returns the send that matches what a recv-done received: of the same rendezvous, or the same pairs."""
    received = around.by_name.get(done.operands[0])
    meeting = _meeting(received) if received is not None else None
    sends = (each for each in around.instructions if each.opcode == "send")
    return [each.name for each in sends if meeting and _meeting(each) == meeting]


def _meeting(instruction: Instruction) -> str | None:
    found = _RENDEZVOUS.search(instruction.attributes) or _PAIRS.search(instruction.attributes)
    return found[1] if found else None
