"""Finds devices of a program that compute the same: a value is the same on two of them where all that it is made of is.

    %x = parameter(0), sharding={devices=[2,1,2]<=[4] last_tile_dim_replicate}    0 and 1 have the same rows, 2 and 3
    %w = parameter(1), sharding={devices=[1,4]<=[4]}                              all have others
    %g = all-gather(%w), replica_groups={{0,1,2,3}}                               all have the same
    %d = dot(%x, %g)                                                              two results, each computed twice

What differs between devices comes in by the program's arguments, by `partition-id`, and by what nothing is known of;
collectives make it the same within their groups. Wherever the text does not say, devices are taken to differ: so what
is found to be the same is the same, and some of it is not found.

The same walk finds collectives that hang: in a branch that some stages of their group take, and others do not.

    %which = compare(%stage, %last)                                   differs between stages
    conditional(%which, ..), branch_computations={%idle, %head}
    %head: all-reduce(..), replica_groups={{0,2,4,6},{1,3,5,7}}       stages 0 to 3: those that idle never come

All devices of a group have to come to a collective. Within one stage they take the same branches; across stages only
where the predicate is the same on all of them.
"""

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..hlo import Computation, HloError, Instruction, Module
from ..hlo.flow import num_trips
from ..hlo.groups import ReplicaGroups, groups_of, parse_groups
from ..hlo.opcodes import COLLECTIVES, collective_kind
from ..hlo.types import elements_of, parse_type
from .kernels import kernel_work
from .program import begun_by, global_groups

Classes = tuple[int, ...]  # a number for each device; devices with the same value have the same number
Value = Classes | list["Value"]

MOST_ROUNDS = 8  # walks over a loop until its state is known; a longer chain counts as different on each device
_LISTED = re.compile(r"\{devices=\[([\d,]+)\]([\d,]+)")
_TILED = re.compile(r"\{devices=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_DIFFERENT = frozenset(
    {"infeed", "partition-id", "recv", "recv-done", "rng", "rng-get-and-update-state", "send", "send-done"}
)
_SAME = frozenset({"after-all", "constant", "iota"})
_WRAPPED = frozenset({"async-start", "call-start"})


@dataclass(frozen=True)
class Repeated:
    """The arithmetic of one instruction in a step. within: the instruction of the schedule that holds it. classes: a
    number for each device; devices that compute the same have the same number."""

    instruction: Instruction
    within: str
    flops: float
    classes: Classes

    @property
    def num_different(self) -> int:
        """Returns how many different results the devices compute."""
        return len(set(self.classes))

    @property
    def num_times(self) -> float:
        """Returns how often each result is computed, on average."""
        return len(self.classes) / self.num_different

    @property
    def alike(self) -> tuple[int, ...]:
        """Returns the devices that compute what the first does."""
        return tuple(device for device, number in enumerate(self.classes) if number == self.classes[0])


Found = dict[tuple[int, str, int], Repeated]  # by instruction, the scheduled instruction around it, and classes


def find_repeated(module: Module) -> tuple[Repeated, ...]:
    """Returns all arithmetic of a scheduled program, with the devices that compute the same. Empty for a program of one
    device or of several replicas, whose arguments the text does not tell apart."""
    walk = _walked(module)
    return tuple(walk.found.values()) if walk else ()


def find_predicates(module: Module) -> Mapping[str, Classes]:
    """Returns, for each conditional that runs, the devices that have the same predicate. Empty where `find_repeated`
    is."""
    walk = _walked(module)
    return {name: walk.join(values) for name, values in walk.predicates.items()} if walk else {}


def _walked(module: Module) -> "_Walk | None":
    if module.num_partitions == 1 or module.num_replicas > 1:
        return None
    walk = _Walk(module)
    entry = module.entry_computation
    walk.run(entry, [walk.argument(each) for each in entry.parameters], times=1)
    return walk


@dataclass
class _Walk:
    """Walks a program with the classes of each value. predicates: those of each conditional, by name. found: the
    arithmetic, filled where instructions run `times`; times is 0 while a loop's state is not known yet. Equal classes
    are one object, so that they are joined once. A computation is walked once for the same arguments, with what it
    finds."""

    module: Module
    found: Found = field(default_factory=dict)
    predicates: dict[str, list[Value]] = field(default_factory=dict)
    _there: dict[Classes, Classes] = field(default_factory=dict)
    _joined: dict[tuple[int, int], Classes] = field(default_factory=dict)
    _known: dict[Hashable, tuple[Value, Found]] = field(default_factory=dict)
    _within: str = ""

    def __post_init__(self) -> None:
        self.num_devices = self.module.num_partitions
        self.same = self.numbered((0,) * self.num_devices)
        self.different = self.numbered(range(self.num_devices))

    def numbered(self, labels: Iterable[Hashable]) -> Classes:
        """Returns labels as numbers in the order of their first places: "b", "a", "b" -> 0, 1, 0."""
        numbers: dict[Hashable, int] = {}
        found = tuple(numbers.setdefault(label, len(numbers)) for label in labels)
        return self._there.setdefault(found, found)

    def argument(self, parameter: Instruction) -> Value:
        """Returns the devices that have the same of an argument of the program."""
        text = parameter.attribute("sharding") or ""
        if elements_of(parameter.type_text) is not None:
            return self.different
        if text in ("{replicated}", "{maximal device=0}"):
            return self.same
        tiled = _TILED.match(text)
        is_shared = "last_tile_dim_replicate" in text or "last_tile_dims={replicated}" in text
        if not (tiled or _LISTED.match(text)) or ("last_tile_dims" in text and not is_shared):
            return self.different
        try:
            tiles = parse_groups(tiled[1], self.num_devices) if tiled else _listed_tiles(text)
        except HloError:
            return self.different
        if not is_shared:
            return self.different
        tile_of = {device: number for number, tile in enumerate(tiles) for device in tile}
        return self.numbered(tile_of.get(device, -1 - device) for device in range(self.num_devices))

    def run(self, computation: Computation, arguments: Sequence[Value], *, times: float) -> Value:
        """Returns the value of a computation."""
        key = (computation.name, self._within, bool(times), tuple(map(_key, arguments)))
        if key not in self._known:
            outer, self.found = self.found, {}
            value = self._run(computation, arguments, float(bool(times)))
            self._known[key] = value, self.found
            self.found = outer
        value, found = self._known[key]
        _add(found, self.found, times)
        return value

    def _run(self, computation: Computation, arguments: Sequence[Value], times: float) -> Value:
        values: dict[str, Value] = {}
        is_scheduled = not self._within
        for each in computation.instructions:
            if is_scheduled and each.opcode not in ("call", "conditional", "while"):
                self._within = each.name
            values[each.name] = self._value(each, computation, values, arguments, times)
            if is_scheduled:
                self._within = ""
        return values[computation.root.name]

    def join(self, values: Iterable[Value]) -> Classes:
        """Returns the devices that have the same of all values."""
        found = self.same
        for leaf in (leaf for value in values for leaf in _leaves(value)):
            if found is self.same or leaf is self.different:
                found = leaf
            elif leaf is not self.same and leaf is not found:
                key = (id(found), id(leaf))
                if key not in self._joined:
                    self._joined[key] = self.numbered(zip(found, leaf, strict=True))
                found = self._joined[key]
            if found is self.different:
                break
        return found

    def _value(
        self,
        each: Instruction,
        around: Computation,
        values: Mapping[str, Value],
        arguments: Sequence[Value],
        times: float,
    ) -> Value:
        opcode, operands = each.opcode, [values[name] for name in each.operands]
        base = opcode.removesuffix("-start")
        if opcode == "parameter":
            return arguments[int(each.argument)]
        if opcode in _SAME:
            return self.same
        if opcode in _DIFFERENT:
            return self.different
        if opcode == "tuple":
            return list(operands)
        if opcode == "get-tuple-element":
            return _element(operands[0], int(each.attribute("index") or 0))
        if opcode in ("copy-start", "slice-start", "all-reduce-done"):  # no pair of operand and result
            return operands[0]
        if base in COLLECTIVES:
            return self._collective(each, base, operands)
        if opcode in _WRAPPED:
            return [list(operands), self.run(self._called(each), operands, times=times)]
        if opcode.endswith("-done") or opcode in ("async-update", "call-update"):
            started = operands[0]
            is_pair = opcode.endswith("-done") and isinstance(started, list) and len(started) > 1
            return _element(started, 1) if is_pair else started
        if opcode == "while":
            return self._loop(each, around, operands[0], times)
        if opcode == "conditional":
            return self._conditional(each, operands, times)
        if opcode in ("call", "fusion"):
            return self.run(self._called(each), operands, times=times)
        # On TPUs what starts or ends a transfer is a custom call, with the collective among its operands.
        target = each.attribute("custom_call_target") or ""
        moved = [name for name in each.operands if around.by_name[name].opcode in COLLECTIVES]
        if target == "AsyncCollectiveDone" and moved:
            return values[moved[0]]
        if target == "AsyncCollectiveStart" and moved:
            others = len(elements_of(each.type_text) or ()) - 2
            return [operands[0], values[moved[0]], *([self.different] * max(0, others))]
        return self._computed(each, around, operands, times)

    def _conditional(self, each: Instruction, operands: Sequence[Value], times: float) -> Value:
        """Returns the value of a conditional. One of its branches runs: what is in several of them counts once."""
        self.predicates.setdefault(each.name, []).append(operands[0])
        outer, most, results = self.found, Found(), list[Value]()
        for name, argument in zip(each.called, operands[1:], strict=True):
            self.found = {}
            results.append(self.run(self.module.computations[name], [argument], times=times))
            for key, one in self.found.items():
                if key not in most or one.flops > most[key].flops:
                    most[key] = one
        self.found = outer
        _add(most, self.found, 1)
        return self._either([*results, operands[0]])

    def _computed(self, each: Instruction, around: Computation, operands: Sequence[Value], times: float) -> Classes:
        classes = self.join(operands)
        types = tuple(array for name in each.operands for array in parse_type(around.by_name[name].type_text))
        if times and (flops := kernel_work(each, types).flops):
            one = Repeated(each, self._within, flops, classes)
            _add({(id(each), self._within, id(classes)): one}, self.found, times)
        return classes

    def _loop(self, each: Instruction, around: Computation, given: Value, times: float) -> Value:
        """Returns the state of a loop: what is the same at its start and stays the same in each iteration."""
        body = self.module.computations[each.body]
        condition = self.module.computations[each.condition]
        state = given
        for _ in range(MOST_ROUNDS):
            after = self.run(body, [state], times=0)
            is_over = self.run(condition, [state], times=0)
            joined = self._either([state, after, is_over] if self.join([is_over]) != self.same else [state, after])
            if joined == state:
                break
            state = joined
        else:
            state = self.different
        if times:
            trips = num_trips(each, around, self.module)
            self.run(body, [state], times=times * (1 if trips is None else trips))
        return state

    def _either(self, values: Sequence[Value]) -> Value:
        """Returns the value that is one of several, element by element."""
        lists = [value for value in values if isinstance(value, list)]
        if lists and len({len(value) for value in lists}) == 1:
            size = len(lists[0])
            spread = [value if isinstance(value, list) else [value] * size for value in values]
            return [self._either(several) for several in zip(*spread, strict=True)]
        return self.join(values)

    def _collective(self, each: Instruction, base: str, operands: Sequence[Value]) -> Value:
        named = None if base == "send" else groups_of(each, self.module.num_devices)
        if named is None:
            return self.different
        groups = global_groups(named, each, self.module)
        results = [self._exchanged(base, self.join([operand]), groups) for operand in operands]
        result: Value = results[0] if len(results) == 1 else list(results)
        if base == "all-to-all" and len(operands) > 1:  # each result has a part of every operand
            result = self._exchanged(base, self.join(operands), groups)
        is_pair = each.opcode.endswith("-start") and base != "all-reduce"
        return [list(operands), result] if is_pair else result

    def _exchanged(self, base: str, before: Classes, groups: Sequence[Sequence[int]]) -> Classes:
        if base == "collective-permute":
            sent = {to: before[source] for source, to in groups}
            return self.numbered(sent.get(device) for device in range(self.num_devices))  # others have zeros
        found: dict[int, Hashable] = {device: ("alone", device) for device in range(self.num_devices)}
        is_whole = base in ("all-gather", "all-reduce", "collective-broadcast")
        for group in groups:
            of_all = tuple(before[device] for device in group)
            for place, device in enumerate(group):
                found[device] = of_all if is_whole else (of_all, place)
        return self.numbered(found[device] for device in range(self.num_devices))

    def _called(self, each: Instruction) -> Computation:
        return self.module.computations[each.called[0]]


def _add(found: Found, to: Found, times: float) -> None:
    """Adds the arithmetic of one run of a computation, for so many runs."""
    for key, one in found.items():
        before = to[key].flops if key in to else 0.0
        to[key] = replace(one, flops=before + one.flops * times)


def _leaves(value: Value) -> Iterator[Classes]:
    if isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _key(value: Value) -> Hashable:
    return tuple(map(_key, value)) if isinstance(value, list) else id(value)


def _element(value: Value, index: int) -> Value:
    return value[index] if isinstance(value, list) and index < len(value) else value


def _listed_tiles(text: str) -> list[tuple[int, ...]]:
    sizes, listed = re.findall(r"\d+(?:,\d+)*", text)[:2]
    size, devices = int(sizes.split(",")[-1]), [int(number) for number in listed.split(",")]
    return [tuple(devices[start : start + size]) for start in range(0, len(devices), size)]


@dataclass(frozen=True)
class Divergent:
    """A collective in a branch of a conditional that not all stages of its group need take. stages: those of the
    group."""

    collective: Instruction
    conditional: Instruction
    stages: tuple[int, ...]


def find_divergent(module: Module, stage_of: Sequence[int]) -> tuple[Divergent, ...]:
    """Returns the collectives that hang, each once for each conditional around it. stage_of: the stage of each device.
    Raises HloError for an unknown form of replica groups."""
    predicates = find_predicates(module)
    found: dict[tuple[str, str], Divergent] = {}
    instructions = (each for computation in module.computations.values() for each in computation.instructions)
    for conditional in (each for each in instructions if each.opcode == "conditional"):
        within = (around for name in conditional.called for around in module.computations_within(name))
        collectives = ((each, around) for around in within for each in around.instructions)
        for collective, around in ((each, around) for each, around in collectives if collective_kind(each.opcode)):
            for group in _groups(collective, around, module, len(stage_of)):
                stages = sorted({stage_of[device] for device in group})
                if len(stages) > 1 and not _is_same(predicates.get(conditional.name), group):
                    key = collective.name, conditional.name
                    found.setdefault(key, Divergent(collective, conditional, tuple(stages)))
    return tuple(found.values())


def _groups(collective: Instruction, around: Computation, module: Module, num_devices: int) -> ReplicaGroups:
    """Returns the groups of a collective; all devices, where it does not say."""
    devices = tuple(range(num_devices))
    if collective.opcode == "send":
        return begun_by(collective, around, module.num_devices).groups or (devices,)
    try:
        groups = groups_of(collective, module.num_devices)
        return (devices,) if groups is None else global_groups(groups, collective, module)
    except HloError as error:
        raise HloError(f"{collective.name}: {error}") from error


def _is_same(predicate: Classes | None, group: Sequence[int]) -> bool:
    """Returns True if all devices of a group have the same predicate: among slices, of which the program is that of
    one, if all devices have."""
    if predicate is None:
        return False
    own = group if max(group) < len(predicate) else range(len(predicate))
    return len({predicate[device] for device in own}) == 1
