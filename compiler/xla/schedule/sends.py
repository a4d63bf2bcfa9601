"""Sends and what is received: of TPUs collectives across slices, by way of the hosts; of GPUs pairs of devices.

    send(%x, %t), frontend_attributes={..., _xla_host_transfer_rendezvous="psum.99_0",
      _xla_megascale_target="{1,2}x{0:7}", _xla_megascale_transfer_type="ALL_REDUCE"}

is an all-reduce between two slices, of each of their devices 0 to 7 with its like, over when it is received.

    _xla_megascale_target={{100000->200000},{100001->200001}}, _xla_megascale_transfer_type="ONE_TO_ONE"

is what device 0 of the first slice sends to device 0 of the second, and device 1 to device 1.
"""

import re

from ...core.collectives import MOVING, CollectiveKind
from ..hlo import Computation, Instruction
from ..hlo.groups import parse_groups
from .steps import Collective

_TARGET = re.compile(r'_xla_megascale_target="\{([\d,]+)\}x')
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_KINDS: dict[str, CollectiveKind] = {
    "ALL_GATHER": "all-gather", "ALL_REDUCE": "all-reduce", "ALL_TO_ALL": "all-to-all",
    "REDUCE_SCATTER": "reduce-scatter",
}  # fmt: skip
_BETWEEN = re.compile(r"\{(\d+)->(\d+)\}")
_SLICE = 100_000  # the first device of a slice, which are counted from 1
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_PAIRS = re.compile(r'_xla_send_recv_source_target_pairs="?(\{\{[\d,{}\s]*\}\})')


def begun_by(send: Instruction, around: Computation, num_devices: int) -> Collective:
    """Returns the transfer that a send begins."""
    target, transfer, pairs = (form.search(send.attributes) for form in (_TARGET, _TRANSFER, _PAIRS))
    kind = _KINDS.get(transfer[1]) if transfer and target else "send"
    num_slices = len(target[1].split(",")) if target and kind else None
    source = around.by_name.get(send.operands[0])
    arrays = source.arrays if source is not None else ()
    times = num_slices if num_slices and kind in MOVING else 1  # a part is sent
    return Collective(
        name=send.name,
        kind=kind or "send",
        num_bytes=times * sum(array.num_bytes for array in arrays),
        num_elements=tuple(times * array.num_elements for array in arrays),
        dtype=arrays[0].dtype if arrays else "",
        groups=parse_groups(pairs[1], num_devices) if pairs else _between_slices(send, num_devices),
        is_async=True,
        form="send",
        op_name=send.op_name,
        computation=around.name,
        num_slices=num_slices,
        is_certain=bool((kind or _BETWEEN.search(send.attributes)) and arrays),
    )


def _between_slices(send: Instruction, num_devices: int) -> tuple[tuple[int, int], ...]:
    """Returns pairs of devices, those of a slice after those of the slice before it."""
    pairs = [(int(source), int(to)) for source, to in _BETWEEN.findall(send.attributes)]
    num_slices = max((end // _SLICE for pair in pairs for end in pair), default=1)
    per_slice = num_devices // num_slices

    def position(device: int) -> int:
        return (device // _SLICE - 1) * per_slice + device % _SLICE

    return tuple((position(source), position(to)) for source, to in pairs)


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
