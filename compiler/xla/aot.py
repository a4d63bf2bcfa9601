"""Lowers and compiles ahead of time, and tells a refusal for lack of memory from a mistake in the options.

A program for a topology cannot run here. It has a text, its memory and a serialised form.
"""

import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from ..core.errors import ConfigError
from ..jax_private import taking_packed
from ..plan import Plan
from ..target.compiler_options import option_problem
from .pgle import OPTION, SUFFIX
from .programs import PROGRAMS, Fingerprint, Programs, build, fingerprint_of, lower

REMATERIALIZATION = "Involuntary full rematerialization"  # printed by JAX 0.12 where it gathers a whole array
TRAIN = "train"
UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_TOO_LARGE = re.compile(r"Ran out of memory (?:on|in memory space) hbm", re.I)
_SIZES = (  # the sizes needed and available, in each form that libtpu has been seen to use
    re.compile(r"\((?P<needed>[\d.]+[BKMGT]?)\) exceeds available HBM \((?P<available>[\d.]+[BKMGT]?)\)"),
    re.compile(r"Used (?P<needed>[\d.]+[BKMGT]?) of (?P<available>[\d.]+[BKMGT]?) hbm", re.I),
)


@dataclass(frozen=True)
class LoweredStep:
    """The programs of a plan before they are compiled, with their fingerprint. seconds: the time that lowering took.
    pgle: returns the PGLE file by which the train step is scheduled, from the text of the one that was compiled
    without; None: no such file."""

    programs: Programs
    fingerprint: Fingerprint
    seconds: float
    pgle: Callable[[str], str] | None = None


@dataclass(frozen=True)
class OutOfMemory:
    """The compiler could not fit the program into a device's memory. needed_bytes: the least that it found, with all
    arrays; None where its message does not say. available_bytes: the limit, likewise. said: the first line of its
    message."""

    needed_bytes: int | None
    available_bytes: int | None
    said: str


@dataclass(frozen=True)
class ProgramMemory:
    """The bytes of a program on one device, as XLA lays them out."""

    arguments_bytes: int
    outputs_bytes: int
    aliased_bytes: int  # the part of the outputs that is written into donated arguments
    temporaries_bytes: int  # including the gaps between arrays
    code_bytes: int
    host_bytes: int  # arrays in the host's memory
    peak_bytes: int  # the most that lives at once, including arguments, without the gaps

    @property
    def taken_bytes(self) -> int:
        """Returns the bytes that have to be free on the device. Code is not included: libtpu has let arrays of 15.72
        GiB and 0.04 GiB of code pass at a limit of 15.75 GiB. (peak_bytes was 11.28 GiB for that program.)"""
        return self.arguments_bytes + self.outputs_bytes - self.aliased_bytes + self.temporaries_bytes

    def needed_bytes(self, platform: str) -> int | None:
        """Returns what the program needs of a device; None where the compiler's numbers do not say.

        For a TPU that is what lives at once: it is not refused for the gaps between arrays. (Programs of 17.6 GiB with
        gaps and 13.4 GiB without compile for a limit of 15.75 GiB.) If arrays lie on the host, libtpu 0.0.42.1 reports
        the arguments and the larger of two peaks, the device's and the host's: 3.08 + 10.00 GiB for llama3_70b with
        10.00 GiB on the host and 9.2 GiB of temporaries on the device. On other platforms the gaps count: temporaries
        of a GPU are one block.
        """
        if platform != "tpu":
            return self.taken_bytes
        return None if self.host_bytes else self.peak_bytes


@dataclass(frozen=True)
class Built:
    """The compiler's output for all programs. text, memory: those of the train step; None if it does not fit.
    executables: the serialised programs, by name. not_serialised: the reason for each of the others. notes: the
    compiler's lines about arrays that it gathers whole without being asked (REMATERIALIZATION). cache: whether the
    programs were found among earlier ones; off: nothing was looked up. pgle: the PGLE file by which the train step was
    scheduled; None: without one."""

    text: str | None
    memory: ProgramMemory | None
    out_of_memory: OutOfMemory | None
    executables: Mapping[str, bytes]
    not_serialised: Mapping[str, str]
    compile_seconds: float
    notes: tuple[str, ...]
    cache: Literal["hit", "miss", "off"] = "off"
    pgle: str | None = None


def lower_ahead(plan: Plan, mesh: Mesh) -> LoweredStep:
    """Lowers all programs; for chips that are not attached only the train step: the others take seconds where it
    runs."""
    start = time.perf_counter()
    programs = lower(plan, mesh, PROGRAMS if plan.target.is_attached else (TRAIN,))
    seconds = time.perf_counter() - start
    return LoweredStep(programs, fingerprint_of(plan, programs, mesh), seconds)


def compile_ahead(lowered: LoweredStep) -> Built:
    """Compiles what was lowered, the train step among it; that step again where a PGLE file is made from the first
    one. Raises ConfigError for options that the compiler refuses, and for a PGLE file of another program."""
    start, pgle = time.perf_counter(), None
    try:
        compiled = build(lowered.programs)
        if lowered.pgle is not None:
            pgle = lowered.pgle(compiled[TRAIN].as_text())
            compiled = replace(compiled, by_name={**compiled, **build_by_pgle(lowered.programs, pgle)})
    except jax.errors.JaxRuntimeError as error:
        if refused := parse_out_of_memory(str(error)):
            return Built(None, None, refused, {}, {}, time.perf_counter() - start, ())
        if problem := option_problem(str(error), "this target"):
            raise ConfigError([problem]) from error
        raise
    return replace(built_of(compiled, time.perf_counter() - start), pgle=pgle)


def build_by_pgle(lowered: Programs, pgle: str) -> Programs:
    """Returns the train step, compiled by the times of a PGLE file."""
    with tempfile.NamedTemporaryFile("w", suffix=SUFFIX) as file:
        file.write(pgle)
        file.flush()
        options = {**lowered.compiler_options, OPTION: file.name}
        return build(replace(lowered, by_name={TRAIN: lowered[TRAIN]}, compiler_options=options))


def built_of(compiled: Programs, seconds: float) -> Built:
    """Returns compiled programs in the form in which they are saved. seconds: the time that compiling took."""
    executables, not_serialised = {}, {}
    for name, program in compiled.items():
        try:
            executables[name] = serialize_executable.serialize(program)[0]
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            not_serialised[name] = str(error).splitlines()[0]
    text, memory = compiled["train"].as_text(), memory_of(compiled["train"])
    return Built(text, memory, None, executables, not_serialised, seconds, ())


def load_program(executable: bytes, lowered: Any, mesh: Mesh) -> Any:
    """Returns a serialised program as a `jax.stages.Compiled` for these devices. lowered: the same program, lowered.

    Give it only bytes that you trust: loading them runs code.
    """
    devices = list(mesh.devices.flat)
    loaded = serialize_executable.deserialize_and_load(
        executable, lowered.in_tree, lowered.out_tree, backend=devices[0].client, execution_devices=devices
    )
    return taking_packed(loaded)


def memory_of(compiled: Any) -> ProgramMemory:
    """Returns the memory of a compiled program."""
    stats = compiled.memory_analysis()
    host = ("argument", "output", "temp", "generated_code")
    return ProgramMemory(
        arguments_bytes=stats.argument_size_in_bytes,
        outputs_bytes=stats.output_size_in_bytes,
        aliased_bytes=stats.alias_size_in_bytes,
        temporaries_bytes=stats.temp_size_in_bytes,
        code_bytes=stats.generated_code_size_in_bytes,
        host_bytes=sum(getattr(stats, f"host_{name}_size_in_bytes") for name in host) - stats.host_alias_size_in_bytes,
        peak_bytes=stats.peak_memory_in_bytes,
    )


def parse_out_of_memory(said: str) -> OutOfMemory | None:
    """Returns what "... (638.11G) exceeds available HBM (15.75G)" says; None for any other error."""
    if not _TOO_LARGE.search(said):
        return None
    sizes = next((match for form in _SIZES if (match := form.search(said))), None)
    needed, available = (_bytes(sizes["needed"]), _bytes(sizes["available"])) if sizes else (None, None)
    return OutOfMemory(needed, available, said.splitlines()[0])


def _bytes(text: str) -> int:
    """Returns the bytes of a size: "15.75G" -> 16911433728."""
    number = text.rstrip("BKMGT")
    return int(float(number) * UNITS[text[len(number) :]])
