"""Reads a scheduled module as the steps of one device, with every form in which a compiler writes a collective.

all-gather                           synchronous
all-gather-start, all-gather-done    asynchronous (GPU)
fusion around AsyncCollectiveStart   asynchronous (TPU): chunks are sent from within the matmuls that follow
fusion around an all-reduce and a dynamic-slice    a reduce-scatter (TPU), synchronous
async-start, -update, -done          asynchronous, on another unit (TPU: SparseCore) where what they call is a
                                     collective, or several; otherwise a copy between memories
copies to and from the host          over the link to the host, asynchronous where they start and are done apart
send, recv, their -done              of TPUs a collective across slices, by way of the hosts, named in the send's
                                     attributes; of GPUs pairs of devices. From the send until what is received is there

    send(%x, %t), frontend_attributes={..., _xla_host_transfer_rendezvous="psum.99_0",
      _xla_megascale_target="{1,2}x{0:7}", _xla_megascale_transfer_type="ALL_REDUCE"}

is an all-reduce between two slices, of each of their devices 0 to 7 with its like, over when it is received.

    _xla_megascale_target={{100000->200000},{100001->200001}}, _xla_megascale_transfer_type="ONE_TO_ONE"

is what device 0 of the first slice sends to device 0 of the second, and device 1 to device 1; of an ALL_TO_ALL,
{{100000,100001,200000,200001}} is a group. Such a program is that of one slice, which all of them run: it has as many
partitions as a slice has devices. In the groups of sends, the devices of a slice come after those of the slice before.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import dropwhile
from typing import Any

from ...core.kernels import KernelOwner
from ...core.scopes import MATMUL, SENT, OperationName
from ...core.traffic import MOVING, CollectiveKind
from ..hlo import Computation, HloError, Instruction, Module
from ..hlo.flow import Flow, ModuleValue, num_trips
from ..hlo.groups import ReplicaGroups, groups_of, parse_groups
from ..hlo.opcodes import BLOCKS, COLLECTIVES, SAME_ELEMENTS, collective_kind
from ..hlo.types import ArrayType, elements_of, parse_type
from .host_copies import HostCopy, host_copies
from .prices import Chip, price_instruction
from .steps import Branches, Collective, Compute, Done, Loop, Start, Step

_MOST_FOLLOWED = 16  # instructions from a collective back to the matmuls that compute its operands
_KIND_IN_NAME = re.compile("|".join(COLLECTIVES).replace("|send", ""))
_STRATEGY = re.compile(r"(\w*Strategy\w*)\{colors:(\d+)")
_GATHER = re.compile(r'"emitter":"(\d)DAllGather')
_STARTS, _UPDATES, _DONES = (frozenset({f"async-{part}", f"call-{part}"}) for part in ("start", "update", "done"))
_ASYNC = _STARTS | _UPDATES | _DONES


@dataclass(frozen=True)
class Inner:
    """A collective inside an instruction, with its computation."""

    instruction: Instruction
    computation: Computation


def read_steps(module: Module, chip: Chip, ops: Sequence[KernelOwner] = ()) -> tuple[Step, ...]:
    """Returns what one device does in a step. ops: operations that know their own kernels. Raises HloError for a form
    of replica groups that is not known."""
    return _Reader(module, chip, ops).steps_of(module.entry_computation)


@dataclass
class _Reader:
    module: Module
    chip: Chip
    ops: Sequence[KernelOwner]
    _read: dict[str, tuple[Step, ...]] = field(default_factory=dict)

    def steps_of(self, computation: Computation) -> tuple[Step, ...]:
        if computation.name not in self._read:
            found = [step for each in computation.instructions for step in self._steps(each, computation)]
            self._read[computation.name] = tuple(found)
        return self._read[computation.name]

    def _steps(self, instruction: Instruction, around: Computation) -> list[Step]:
        opcode = instruction.opcode
        base = opcode.removesuffix("-start").removesuffix("-done")
        if opcode == "while":
            body = self.module.computations[instruction.body]
            if OperationName(instruction.op_name).is_at_most_once:
                return [Branches(instruction.name, (self.steps_of(body), ()), op_name=instruction.op_name, on=0)]
            return [Loop(instruction.name, num_trips(instruction, around, self.module), self.steps_of(body))]
        if opcode == "conditional":
            branches = [self.module.computations[name] for name in instruction.called]
            on = None if len(branches) != 2 else 0 if instruction.attribute("true_computation") else 1
            steps = tuple(map(self.steps_of, branches))
            return [Branches(instruction.name, steps, op_name=instruction.op_name, on=on)]
        if opcode == "call":
            return [step for name in instruction.called for step in self.steps_of(self.module.computations[name])]
        if opcode == "recv":
            return []  # the other half of a send
        if opcode == "recv-done":
            return [Done(name, instruction.name) for name in answered_by(instruction, around)]
        if opcode == "send-done" and is_answered(instruction.operands[0], around):
            return []  # the data has left the device; the transfer ends where it is received
        if opcode == "send":
            return [Start(begun_by(instruction, around, self.module.num_devices))]
        if opcode in COLLECTIVES:
            return self._at_once(Inner(instruction, around), instruction, around, form="synchronous")
        if base in COLLECTIVES:
            if opcode.endswith("-done"):
                return [Done(instruction.operands[0], instruction.name)]
            return [Start(self._collective(Inner(instruction, around), instruction, around, opcode, is_async=True))]
        if opcode in _ASYNC:
            return self._asynchronous(instruction, around)
        copied = host_copies(instruction, around, self.module)
        if copied and opcode != "fusion":
            return _copies(copied, instruction, around)
        begun = around.by_name[instruction.operands[0]] if opcode.endswith("-done") else instruction
        if begun.opcode.endswith("-start") and (started := host_copies(begun, around, self.module)):
            return _copied(started, begun, instruction)
        if opcode == "fusion":
            copies = _copies(copied, instruction, around)
            return [*copies[: len(copied)], *self._fusion(instruction, around), *copies[len(copied) :]]
        return self._computed(instruction, around)

    def _fusion(self, instruction: Instruction, around: Computation) -> list[Step]:
        inner = self._inside(instruction)
        if inner is None:
            return self._computed(instruction, around)
        targets = {each.attribute("custom_call_target") for each in inner.computation.instructions}
        if "AsyncCollectiveStart" in targets:
            form = "collective fusion"
            return [Start(self._collective(inner, instruction, around, form, is_async=True))]
        if "AsyncCollectiveDone" in targets:
            return [Done(self._started_by(instruction, around), instruction.name)]
        if self._is_chunk(inner, instruction, around):
            return self._computed(instruction, around, sends=True)
        return self._at_once(inner, instruction, around, form="synchronous, fused") + self._computed(
            instruction, around
        )

    def _asynchronous(self, instruction: Instruction, around: Computation) -> list[Step]:
        """Returns where the transfer begins: in a chain start, update, done the last instruction before `done`."""
        chain = self._chain(instruction, around)
        inner = self._inside(chain[0])
        named = _KIND_IN_NAME.search(chain[0].name)
        if inner is None and named is None:
            if copied := host_copies(chain[0], around, self.module):
                if instruction.opcode in _DONES:
                    return _copied(copied, chain[0], instruction)
                return _copies(copied, instruction, around) if instruction is chain[0] else []
            if instruction.opcode not in _STARTS:
                return []
            called = [self.module.computations[name] for name in instruction.called]
            return [step for computation in called for step in self.steps_of(computation) if isinstance(step, Compute)]
        others = _of_other_kinds(inner) if inner is not None else []
        if instruction.opcode in _DONES:
            begun = chain[-2].name
            return [*(Done(_name_of(each, begun), instruction.name) for each in others), Done(begun, instruction.name)]
        if any(each.opcode in _UPDATES and each.operands[0] == instruction.name for each in around.instructions):
            return []
        unit = chain[0].attribute("async_execution_thread")
        form = f"{unit} call" if unit else "async-start"
        if inner is not None:
            first, *rest = (
                self._collective(each, instruction, around, form, is_async=True) for each in (inner, *others)
            )
            named_apart = (replace(one, name=_name_of(each, one.name)) for each, one in zip(others, rest, strict=True))
            return [Start(first), *map(Start, named_apart)]
        assert named is not None
        return [Start(self._guessed(COLLECTIVES[named[0]], instruction, chain[0], around, form))]

    def _chain(self, instruction: Instruction, around: Computation) -> list[Instruction]:
        """Returns the instructions from the start up to this one."""
        chain = [instruction]
        while chain[0].opcode not in _STARTS:
            before = around.by_name.get(chain[0].operands[0])
            if before is None or before.opcode not in (*_ASYNC, "get-tuple-element"):
                break
            chain.insert(0, before)
        return [each for each in chain if each.opcode in _ASYNC]

    def _at_once(self, inner: Inner, instruction: Instruction, around: Computation, *, form: str) -> list[Step]:
        collective = self._collective(inner, instruction, around, form, is_async=False)
        return [Start(collective), Done(collective.name, collective.name)]

    def _computed(self, instruction: Instruction, around: Computation, *, sends: bool = False) -> list[Step]:
        compute = price_instruction(instruction, around, self.module, self.chip, self.ops, sends=sends)
        return [compute] if compute is not None else []

    def _collective(
        self, inner: Inner, instruction: Instruction, around: Computation, form: str, *, is_async: bool
    ) -> Collective:
        """Returns the collective in `inner`, named by the instruction that starts it. Several of one kind in a
        call are counted as one with all their arrays."""
        within, kind = inner.instruction, collective_kind(inner.instruction.opcode)
        assert kind is not None
        beside = inner.computation.instructions if within is not instruction else (within,)
        alike = [Inner(each, inner.computation) for each in beside if each.opcode == within.opcode]
        groups, arrays = self._groups(within), [array for each in alike for array in _arrays(each)]
        is_sliced = kind == "all-reduce" and within is not instruction and self._is_scattered(inner)
        times = len(groups[0]) if groups and kind in MOVING else 1  # each operand is a part
        op_name = within.op_name or instruction.op_name
        if within.opcode.startswith("ragged"):
            op_name = op_name or _name_of_rows(inner)
            share = OperationName(op_name).sent_share
        else:
            share = 1.0
        return Collective(
            name=instruction.name,
            kind="reduce-scatter" if is_sliced else kind,
            num_bytes=round(times * sum(array.num_bytes for array in arrays) * share),
            num_elements=tuple(times * array.num_elements for array in arrays),
            dtype=max(arrays, key=lambda array: array.num_bytes).dtype if arrays else "",
            groups=groups,
            is_async=is_async,
            form=form,
            op_name=op_name,
            computation=around.name,
            is_padded=kind == "all-reduce" and _is_padded(inner),
            num_axes=_num_axes(within.attributes) or _num_axes(instruction.attributes),
            is_certain=bool(groups and arrays),
            made_by=() if op_name else _made_by(inner),
        )

    def _guessed(
        self, kind: CollectiveKind, instruction: Instruction, start: Instruction, around: Computation, form: str
    ) -> Collective:
        """Returns a collective that is hidden behind a call: its kind by its name, its size by its operands or its
        results, whichever are larger. One call may take several arrays."""
        ends = [parse_type(text) for text in elements_of(instruction.type_text) or (instruction.type_text,)]
        arrays = max(ends, key=lambda end: sum(array.num_bytes for array in end)) or parse_type(start.type_text)
        largest = max(arrays, key=lambda array: array.num_bytes)
        candidates = [start, *(each for name in start.called for each in self.module.all_within(name))]
        groups = next((found for each in candidates if (found := self._groups(each))), ())
        return Collective(
            instruction.name, kind, sum(array.num_bytes for array in arrays), largest.dtype, groups, True, form,
            instruction.op_name or start.op_name, around.name, tuple(array.num_elements for array in arrays),
            is_certain=False,
        )  # fmt: skip

    def _groups(self, instruction: Instruction) -> ReplicaGroups:
        try:
            return global_groups(groups_of(instruction, self.module.num_devices) or (), instruction, self.module)
        except HloError as error:
            raise HloError(f"{instruction.name}: {error}") from error

    def _inside(self, instruction: Instruction) -> Inner | None:
        """Returns the collective that an instruction's computations hold."""
        for name in instruction.called:
            computation = self.module.computations.get(name)
            for each in computation.instructions if computation else ():
                if collective_kind(each.opcode) and computation:
                    return Inner(each, computation)
                if each.opcode in ("fusion", "call") and (found := self._inside(each)):
                    return found
        return None

    def _started_by(self, done: Instruction, around: Computation) -> str:
        """Returns the instruction that started what a fused done ends: the first that its operands lead back to."""
        seen, names = set(), list(done.operands)
        while names:
            name = names.pop(0)
            each = around.by_name.get(name)
            if each is None or name in seen:
                continue
            seen.add(name)
            if each.opcode == "fusion" and self._targets(each) & {"AsyncCollectiveStart"}:
                return name
            if each.opcode in SAME_ELEMENTS | {"get-tuple-element", "tuple", "while"} or (
                each.opcode == "fusion" and self._inside(each) is not None
            ):
                names += each.operands
        return done.name

    def _is_scattered(self, inner: Inner) -> bool:
        """Returns True where only a slice of the result leaves the fusion that the collective is in."""
        result = ModuleValue(inner.computation, inner.instruction)
        uses = Flow(self.module).uses(result, within=inner.computation)
        return bool(uses) and all(use.reader.opcode in BLOCKS and not use.is_result for use in uses)

    def _targets(self, instruction: Instruction) -> set[str | None]:
        computations = [self.module.computations[name] for name in instruction.called]
        return {each.attribute("custom_call_target") for c in computations for each in c.instructions}

    def _is_chunk(self, inner: Inner, instruction: Instruction, around: Computation) -> bool:
        """Returns True for compute that sends the chunks of a collective started before it, in its own computation or
        outside of its loop."""
        own = _identity(inner.instruction)
        before = dropwhile(lambda each: each.name != instruction.name, reversed(around.instructions))
        if own in map(self._started, before):
            return True
        return own in self._started_elsewhere.get(around.name, set())

    @cached_property
    def _started_elsewhere(self) -> dict[str, set[Any]]:
        """Returns, by a loop's body, the fused collectives that are in flight while it runs."""
        found: dict[str, set[Any]] = {}
        for computation in self.module.computations.values():
            started = set[Any]()
            for each in computation.instructions:
                started.add(self._started(each))
                if each.opcode == "while":
                    found[each.body] = started - {None}
        return found

    def _started(self, instruction: Instruction) -> Any:
        """Returns the key of the collective that a fusion starts; None for any other instruction."""
        if instruction.opcode != "fusion" or "AsyncCollectiveStart" not in self._targets(instruction):
            return None
        inner = self._inside(instruction)
        return _identity(inner.instruction) if inner else None


def _copies(copies: Sequence[HostCopy], instruction: Instruction, around: Computation) -> list[Step]:
    """Returns copies to or from the host: where they begin and, unless something else waits for them, where they
    end."""
    is_async = instruction.opcode.endswith("-start")
    starts = [
        Start(
            Collective(
                name=_name_of_copy(each, copies, instruction),
                kind=each.kind,
                num_bytes=each.num_bytes,
                dtype=each.dtype,
                groups=(),
                is_async=is_async,
                form=instruction.opcode if is_async or instruction.opcode == "fusion" else "synchronous",
                op_name=each.op_name,
                computation=around.name,
                num_elements=each.sizes,
                is_certain=each.is_certain,
            )
        )
        for each in copies
    ]
    return [*starts, *([] if is_async else _copied(copies, instruction, instruction))]


def _copied(copies: Sequence[HostCopy], start: Instruction, done: Instruction) -> list[Step]:
    return [Done(_name_of_copy(each, copies, start), done.name) for each in reversed(copies)]


def _name_of_copy(copied: HostCopy, copies: Sequence[HostCopy], start: Instruction) -> str:
    """Returns the name of a copy: its start's, with the direction where that starts both."""
    return start.name if copied is copies[0] else f"{start.name} ({copied.kind})"


def _of_other_kinds(inner: Inner) -> list[Inner]:
    """Returns the first collective of each other kind beside one: TPUs join collectives that go to SparseCore together
    into one call, gathers of weights and reductions of gradients alike."""
    kinds = {each.opcode: Inner(each, inner.computation) for each in reversed(inner.computation.instructions)}
    return [each for name, each in kinds.items() if name in COLLECTIVES and name != inner.instruction.opcode]


def _name_of(inner: Inner, call: str) -> str:
    """Returns the name of a collective that shares a call with one of another kind, which has the call's name."""
    return f"{call} ({inner.instruction.opcode})"


def _num_axes(attributes: str) -> int | None:
    """Returns how many axes of the torus carry a TPU's collective at the same time; None where its text does not say.

    "emitter":"1DAllGatherNonMajorDim"                  one ring through all devices of the group
    "emitter":"2DAllGatherOnMajorDim"                   two axes at once
    StrategyND{colors:2 phases:2 ...}                   each color is a part of the data, in each phase on its own axis
    StrategySubgroupND{colors:1 phases:2 ...}           one axis after the other
    UniDirectionNDRingStrategy{colors:4 phases:2 ...}   a color for each direction of two axes
    """
    if gather := _GATHER.search(attributes):
        return int(gather[1])
    if strategy := _STRATEGY.search(attributes):
        colors = int(strategy[2])
        return max(1, colors // 2 if "UniDirection" in strategy[1] else colors)
    return None


def global_groups(groups: ReplicaGroups, instruction: Instruction, module: Module) -> ReplicaGroups:
    """Returns the groups as devices. In a program of both replicas and partitions groups may number either: with a
    channel an all-to-all or a permute numbers partitions, in each replica; others number replicas, with all their
    partitions. Without a channel they number replicas, for each partition."""
    num_replicas, num_parts = module.num_replicas, module.num_partitions
    if min(num_replicas, num_parts) == 1 or "use_global_device_ids=true" in instruction.attributes:
        return groups
    if instruction.attribute("channel_id") is None:
        return tuple(tuple(r * num_parts + p for r in group) for p in range(num_parts) for group in groups)
    if instruction.opcode.startswith(("all-to-all", "collective-permute", "collective-broadcast")):
        return tuple(tuple(r * num_parts + p for p in group) for r in range(num_replicas) for group in groups)
    return tuple(tuple(r * num_parts + p for r in group for p in range(num_parts)) for group in groups)


def _identity(collective: Instruction) -> tuple[str, str | None, tuple[tuple[int, ...], ...]]:
    """Returns a key that all parts of a fused collective share; channel numbers alone are reused."""
    shapes = tuple(array.shape for array in parse_type(collective.type_text))
    return collective.opcode, collective.attribute("channel_id"), shapes


def _arrays(inner: Inner) -> list[ArrayType]:
    """Returns what a collective takes. Of an all-reduce its results: TPUs reduce in float32 what they are given in
    bfloat16. Of a ragged all-to-all the smaller of its first two operands, what is sent and where it arrives: the other
    has more room for uneven loads; the rest says where its parts go."""
    within = inner.instruction
    if within.opcode.startswith("all-reduce"):
        return list(within.arrays)
    is_ragged = within.opcode.startswith("ragged")
    names = within.operands[:2] if is_ragged else within.operands
    operands = [inner.computation.by_name[name] for name in names if name in inner.computation.by_name]
    arrays = [array for each in operands for array in each.arrays]
    return [min(arrays, key=lambda array: array.num_bytes)] if is_ragged and arrays else arrays


def _before(inner: Inner, follows: Callable[[Instruction], bool]) -> Iterator[Instruction]:
    """Yields what computes the operands of a collective, the nearest first. follows: whether to go on to the operands
    of an instruction."""
    seen, names = set[str](), list(inner.instruction.operands)
    while names and len(seen) < _MOST_FOLLOWED:
        each = inner.computation.by_name.get(names.pop(0))
        if each is None or each.name in seen:
            continue
        seen.add(each.name)
        yield each
        if follows(each):
            names += each.operands


def _made_by(inner: Inner) -> tuple[str, ...]:
    """Returns the names of the matmuls that compute a collective's operands, the nearest first: through what adds
    their results or views them otherwise."""

    def is_matmul(each: Instruction) -> bool:
        return bool(OperationName(each.op_name).fact(MATMUL))

    def follows(each: Instruction) -> bool:
        views = each.opcode in SAME_ELEMENTS or each.opcode in ("add", "fusion", "get-tuple-element")
        return views and not is_matmul(each)

    return tuple(each.op_name for each in _before(inner, follows) if is_matmul(each))


def _name_of_rows(inner: Inner) -> str:
    """Returns the name of the nearest operation that computes the operands of a ragged exchange and tells the share of
    its rows that are sent; empty if there is none. XLA gives ragged exchanges on GPUs no name."""
    names = (each.op_name for each in _before(inner, lambda _: True))
    return next((name for name in names if OperationName(name).fact(SENT)), "")


def _is_padded(inner: Inner) -> bool:
    operands = [inner.computation.by_name.get(name) for name in inner.instruction.operands]
    return all(each is not None and each.opcode == "dynamic-update-slice" for each in operands)


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
