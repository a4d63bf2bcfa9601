"""Traces of TPUs and GPUs, written by hand as the profiler would write them: an XSpace as text."""

from collections.abc import Iterable, Mapping, Sequence

from jax.profiler import ProfileData

Op = tuple[str, float, float]  # name of an instruction, begin and end in milliseconds


class _Plane:
    """One plane; names of events and of stats are in tables, as in the protobuf."""

    def __init__(self, name: str):
        self.name, self.lines = name, list[str]()
        self._events: dict[str, int] = {}
        self._stats: dict[str, int] = {}

    def add_line(self, name: str, events: Iterable[tuple[str, float, float, Mapping[str, str | int]]]) -> None:
        told = "".join(self._event(*event) for event in events)
        # Offsets count from the line's own time stamp.
        self.lines.append(f'lines {{ id: {len(self.lines) + 1} name: "{name}" timestamp_ns: 1000000 {told} }}\n')

    def _event(self, name: str, begin: float, end: float, stats: Mapping[str, str | int]) -> str:
        told = ""
        for key, value in stats.items():
            number = self._stats.setdefault(key, len(self._stats) + 1)
            said = f"int64_value: {value}"
            if isinstance(value, str):
                said = f"ref_value: {self._stats.setdefault(value, len(self._stats) + 1)}"
            told += f"stats {{ metadata_id: {number} {said} }} "
        number = self._events.setdefault(name, len(self._events) + 1)
        times = f"offset_ps: {round(begin * 1e9)} duration_ps: {round((end - begin) * 1e9)}"
        return f"events {{ metadata_id: {number} {times} {told}}} "

    def __str__(self) -> str:
        tables = [
            f'{table} {{ key: {number} value {{ id: {number} name: "{name}" }} }}\n'
            for table, names in (("event_metadata", self._events), ("stat_metadata", self._stats))
            for name, number in names.items()
        ]
        return f'planes {{ name: "{self.name}" {"".join(tables)} {"".join(self.lines)} }}\n'


def _bytes(*planes: _Plane) -> bytes:
    return ProfileData.text_proto_to_serialized_xspace("".join(map(str, planes)))


def host(steps: Sequence[int]) -> _Plane:
    """The host that dispatched these steps."""
    plane = _Plane("/host:CPU")
    plane.add_line("python", [("train", float(n), n + 0.1, {"step_num": step}) for n, step in enumerate(steps)])
    return plane


def tpu_trace(devices: Sequence[Sequence[Sequence[Op]]], *, module: str, steps: Sequence[int], every: float) -> bytes:
    """Writes the steps of each device, and the operations of each step. A step takes `every` milliseconds."""
    planes = [host(steps)]
    for number, executions in enumerate(devices):
        plane = _Plane(f"/device:TPU:{number}")
        begins = [every * index for index in range(len(executions))]
        plane.add_line("Steps", [(str(index), at, at + every, {}) for index, at in enumerate(begins)])
        plane.add_line("XLA Modules", [(f"{module}(7)", at, at + every, {"run_id": n}) for n, at in enumerate(begins)])
        plane.add_line(
            "XLA Ops",
            [
                (f"%{name} = bf16[8]{{0}} fusion(bf16[8]{{0}} %x), kind=kLoop", at + begin, at + end, {"hlo_op": name})
                for at, ops in zip(begins, executions, strict=True)
                for name, begin, end in ops
            ],
        )
        plane.add_line("Async XLA Ops", [("all-gather-start.1", 0.0, 99.0, {"flow": 1})])
        planes.append(plane)
    return _bytes(*planes)


def gpu_trace(
    devices: Sequence[Sequence[Mapping[str, Sequence[Op]]]], *, module: str, steps: Sequence[int], every: float
) -> bytes:
    """Writes the steps of each device, and the kernels of each step by stream."""
    planes = [host(steps)]
    for number, executions in enumerate(devices):
        plane = _Plane(f"/device:GPU:{number}")
        streams = dict.fromkeys(name for streams in executions for name in streams)
        for stream in streams:
            kernels = [
                (f"kernel_of_{name.replace('.', '_')}", every * n + begin, every * n + end,
                 {"hlo_op": name, "hlo_module": module, "correlation_id": 3})
                for n, ops in enumerate(executions)
                for name, begin, end in ops.get(stream, ())
            ]  # fmt: skip
            plane.add_line(stream, kernels)
        plane.add_line("XLA Ops", [("mm.1", 0.0, 50.0, {"hlo_op": "mm.1", "hlo_module": module})])
        planes.append(plane)
    return _bytes(*planes)


def field(number: int, value: int | str | bytes) -> bytes:
    """Writes a field of a protocol buffer, a number or bytes."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


def metadata_plane(programs: Mapping[str, bytes], stat: str = "Hlo Proto") -> bytes:
    """Writes the plane of an XSpace that has programs: HloProtos by names such as jit_step(7)."""
    tables = b"".join(
        field(
            4, field(1, number) + field(2, field(1, number) + field(2, name) + field(5, field(1, 3) + field(6, proto)))
        )
        for number, (name, proto) in enumerate(programs.items(), start=7)
    )
    stats = field(5, field(1, 3) + field(2, field(1, 3) + field(2, stat)))
    return field(1, field(1, 99) + field(2, "/host:metadata") + tables + stats)
