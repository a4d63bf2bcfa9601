"""Reads the common names of targets: `target=v5e-256` is `conf/target/_v5e.yaml` with the shape of that slice.

A name is `KIND-N` or `KIND:AxB`, for every kind with a file `_KIND.yaml` and every size of it that exists.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from ..core.errors import Problem, use_one_of
from ..core.format import counted
from .attached import AUTO, LOCAL
from .own_config import own_config
from .target_spec import ChipShape, ChipSpec, SwitchSpec, TorusSpec, nearest_slices, slices_that_exist, torus_name

CLOUD_NAMES = {"v5litepod": "v5e"}  # Google Cloud's name of a kind, where it differs from the common one
_NUMBER = r"[1-9]\d{0,29}"  # longer ones are not parsed
_NAME = re.compile(rf"(?P<kind>[a-z]\w*)(?:-(?P<size>{_NUMBER})|:(?P<shape>{_NUMBER}(?:x{_NUMBER})+))")


@cache
def kinds() -> tuple[str, ...]:
    """Returns the kinds of targets that have sizes: cpu, and each chip that has a file."""
    names = (path.name for path in (files("meshloom.conf") / "target").iterdir())
    sized = (name.removeprefix("_").removesuffix(".yaml") for name in names if re.fullmatch(r"_\w+\.yaml", name))
    return tuple(sorted(sized, key=lambda kind: (kind != "cpu", kind)))


def patterns() -> tuple[str, ...]:
    """Returns the forms of `target=`, for messages: auto, local, cpu-N, v5e-N."""
    return (AUTO, LOCAL, *(f"{kind}-N" for kind in kinds()))


def is_sized(name: str) -> bool:
    """Returns True for a kind with a size that exists, such as cpu-8, v5e-256 or v5p:4x4x8, and for auto."""
    return name == AUTO or parse_name(name) is not None


@cache
def examples(kind: str) -> tuple[str, ...]:
    """Returns some targets of a kind, in the usual sizes."""
    if kind == "cpu":
        return ("cpu-8",)
    chip, network = chip_file(kind)
    if isinstance(network, SwitchSpec):
        sizes = (8, 16, 32, 64, 128, 256, 512, 1024, *(network.chips_per_node * 2**n for n in range(5)))
        return tuple(f"{kind}-{size}" for size in sorted(set(sizes)) if network.shape_of(size))
    counts = sorted({math.prod(shape) for shape in network.shapes()})
    return tuple(f"{kind}-{count * chip.num_cores}" for count in counts if count.bit_count() == 1)


def problem_of(name: str, options: Iterable[str]) -> Problem:
    """Returns what is wrong with a name that is not a target. options: the group's, including a user's own."""
    match = _NAME.fullmatch(name)
    if match and _kind(match) in kinds() and _kind(match) != "cpu":
        return _no_such_size(match)
    own = [option for option in options if not is_sized(option) and option not in patterns()]
    fix = use_one_of(re.sub(r"-\d+$", "-N", name), [*own, *patterns()])
    return Problem("target", f"there is no '{name}' in this group", f"{fix}; N is a size, as in cpu-8 or v5e-256")


@cache
def chip_file(kind: str) -> tuple[ChipSpec, TorusSpec | SwitchSpec]:
    """Returns the figures of one chip and its network, from its file."""
    values = own_config(f"target/_{kind}.yaml")
    network: type[TorusSpec | SwitchSpec] = {"torus": TorusSpec, "switch": SwitchSpec}[values["network"]["kind"]]
    chip = ChipSpec.model_validate_json(json.dumps(values["chip"]))
    return chip, network.model_validate_json(json.dumps(values["network"]))


def parse_name(name: str) -> tuple[str, Mapping[str, int | list[int]]] | None:
    """Returns the kind and the values of a name: 'v5e-256' -> ('v5e', {'shape': [16, 16]}); None for a size that does
    not exist."""
    match = _NAME.fullmatch(name)
    if match is None or (kind := _kind(match)) not in kinds():
        return None
    if kind == "cpu":
        return (kind, {"num_devices": int(match["size"])}) if match["size"] else None
    shape = _shape(match)
    return None if shape is None else (kind, {"shape": list(shape)})


@dataclass(frozen=True)
class SizedDevices:
    """The JAX devices of a target. inner: those of a slice, or of a node of GPUs. num_nodes: of GPUs; 1 for others."""

    platform: Literal["cpu", "gpu", "tpu"]
    inner: int
    num_nodes: int = 1


def sized_devices(name: str) -> SizedDevices | None:
    """Returns the devices of a target in one slice, by its name; None for a size that does not exist."""
    match parse_name(name):
        case (_, {"num_devices": int(inner)}):
            return SizedDevices("cpu", inner)
        case (kind, {"shape": list(shape)}):
            chip, network = chip_file(kind)
            if isinstance(network, SwitchSpec):
                num_nodes, inner = shape
                return SizedDevices("gpu", inner, num_nodes)
            return SizedDevices("tpu", math.prod(shape) * chip.num_devices)
        case _:
            return None


def _kind(match: re.Match[str]) -> str:
    return CLOUD_NAMES.get(match["kind"], match["kind"])


def _shape(match: re.Match[str]) -> ChipShape | None:
    chip, network = chip_file(_kind(match))
    given = tuple(map(int, match["shape"].split("x"))) if match["shape"] else None
    if isinstance(network, SwitchSpec):
        if given:
            return given if len(given) == 2 and given[1] <= network.chips_per_node else None
        return network.shape_of(int(match["size"]))
    if given:
        return given if given in network.shapes() else None
    num_chips, rest = divmod(int(match["size"]), chip.num_cores)
    return None if rest else network.shape_of(num_chips)


def _no_such_size(match: re.Match[str]) -> Problem:
    chip, network = chip_file(_kind(match))
    shown = match["shape"] or match["size"]
    if isinstance(network, SwitchSpec):
        most = network.chips_per_node
        what = f"there is no {chip.name} target of {shown} GPUs: a node has {most}"
        fix = f"use {chip.name}-N with N up to {most} or a multiple of it, or {chip.name}:NODESxGPUS"
        if network.chips_per_host < most:
            where = f"{most} are behind one switch, in hosts of {network.chips_per_host}"
            what = f"there is no {chip.name} target of {shown} GPUs: {where}"
            fix = f"use {chip.name}-N with N whole hosts, in equal parts of each switch, or {chip.name}:DOMAINSxGPUS"
        return Problem("target", what, fix)
    exist = slices_that_exist(chip, network)
    if match["shape"]:
        upright = tuple(sorted(map(int, match["shape"].split("x"))))
        meant = [torus_name(chip, network, upright)] if upright in network.shapes() else []
        return _problem(f"there is no slice of {shown} chips of {chip.name}", exist, meant)
    num_cores = int(shown)
    if num_cores > network.most_chips * chip.num_cores:
        return _too_large(num_cores, chip, network)
    size = (
        counted(num_cores, "chip")
        if chip.num_cores == 1
        else f"{counted(num_cores, 'core')}, {chip.num_cores} to a chip,"
    )
    return _problem(f"there is no slice of {size} of {chip.name}", exist, nearest_slices(chip, network, num_cores))


def _too_large(num_cores: int, chip: ChipSpec, network: TorusSpec) -> Problem:
    """Returns the problem of a size that needs several slices, and names them."""
    largest = network.most_chips * chip.num_cores
    what = f"{chip.name}-{num_cores} is larger than a slice: the largest is {chip.name}-{largest}"
    what += f", {counted(network.most_chips, 'chip')}" if chip.num_cores > 1 else ""
    least = -(-num_cores // largest)
    exact = (n for n in range(least, 4 * least) if num_cores % n == 0 and is_sized(f"{chip.name}-{num_cores // n}"))
    num_slices = next(exact, None) if least < 1000 else None
    size = num_cores // num_slices if num_slices else largest
    fix = f"use several slices: target={chip.name}-{size} target.num_slices={num_slices or least}"
    return Problem("target", what, fix)


def _problem(what: str, exist: str, meant: list[str]) -> Problem:
    near = f" (nearest: {', '.join(meant)})" if meant else ""
    return Problem("target", what, f"use one of {exist}{near}")


def kinds_that_multiply_in(dtype: str) -> list[str]:
    """Returns the kinds of chips whose compiler makes matmuls faster in a type of few bits."""
    return [kind for kind in kinds() if kind != "cpu" and dtype in chip_file(kind)[0].real_types]


def kinds_of_capability(least: tuple[int, int]) -> list[str]:
    """Returns the kinds of GPUs of a compute capability and above."""
    processors = {kind: chip_file(kind)[0].processor for kind in kinds() if kind != "cpu"}
    return [kind for kind, processor in processors.items() if processor and processor.compute_capability >= least]
