"""Makes the PGLE file of a declaration: the prices of a compiled program, or a file that is checked to be of it.

XLA's scheduler takes the times of a profile; here they come from the prices by which the report is made, so no run is
needed. Prices do not depend on the order of a program: those of the program that was scheduled by them are the same.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from ..core.errors import ConfigError, Problem
from ..core.kernels import KernelOwner
from ..spec.overlap_spec import PRICES
from ..target.placement import Placement
from ..xla.hlo import HloError, parse_module
from ..xla.pgle import KEY, check_pgle, pgle_text, program_fingerprint
from ..xla.schedule.program import read_steps
from ..xla.schedule.steps import Compute, Start, every
from .program_devices import ProgramDevices
from .schedule_analysis import chip_of


def pgle_maker(declared: str | None, placement: Placement, ops: Sequence[KernelOwner]) -> Callable[[str], str] | None:
    """Returns a function of the compiled train step's text to its PGLE file; None if none is declared. placement: of
    the step's devices. ops: operations that know their own kernels."""
    if declared is None:
        return None
    if declared == PRICES:
        return lambda text: price_pgle(text, placement, ops)

    def read_checked(text: str) -> str:
        profile = Path(declared).read_text()
        check_pgle(profile, text, declared)
        return profile

    return read_checked


def price_pgle(text: str, placement: Placement, ops: Sequence[KernelOwner]) -> str:
    """Returns a PGLE file with the price of each instruction of a compiled program. Raises ConfigError for a text that
    cannot be priced."""
    try:
        steps = read_steps(parse_module(text), chip_of(placement.target), ops)
    except HloError as error:
        raise _cannot(f"cannot be read: {error}") from None
    if (fingerprint := program_fingerprint(text)) is None:
        raise _cannot("has no fingerprint, by which PGLE files are known")
    devices, seconds = ProgramDevices(placement), dict[str, float]()
    for one in every(steps, Compute):
        if one.seconds:
            seconds[one.name] = one.seconds
    for each in (start.collective for start in every(steps, Start)):  # several kinds may share a call
        once = devices.place(each).alone_seconds or 0.0
        seconds[each.instruction] = seconds.get(each.instruction, 0.0) + once
    return pgle_text(fingerprint, seconds)


def _cannot(why: str) -> ConfigError:
    return ConfigError([Problem(KEY, f"the compiled program {why}", f"set {KEY}=null")])
