"""Declares calibrations: how much longer work takes on a chip than its figures say, as measured in runs."""

from typing import Literal

from pydantic import PositiveFloat

from meshloom.models.config import Config

from ..core.config_types import Text

GROUP = "calibration"
AUTO_CHIP = "auto"  # in place of a chip: the one that the user keeps for the target's chip
CalibratedLink = Literal["ICI", "DCN", "NVLink", "NIC"]


class LinkCalibration(Config):
    """The ratio of measured to predicted seconds of collectives. transfer: for the part that depends on their size;
    latency: for the rest."""

    transfer: PositiveFloat
    latency: PositiveFloat


class Calibration(Config):
    """The ratio of measured to predicted seconds, by kind of compute and by link. chip: the chip that it holds for;
    None: nothing is calibrated; auto: by what the user keeps for the target's chip. source: the runs that it was
    measured in."""

    chip: Text | None
    matmul: PositiveFloat
    attention: PositiveFloat
    other: PositiveFloat
    links: dict[CalibratedLink, LinkCalibration]
    source: Text | None

    def describe(self) -> str:
        """Returns its source and its factors: 'by 2 runs (a, b), 2026-11-25: matmul 1.25, ICI 1.1 (latency 2) times the
        time'."""
        compute = {kind: getattr(self, kind) for kind in ("matmul", "attention", "other")}
        told = [f"{kind} {factor:.3g}" for kind, factor in compute.items() if factor != 1]
        told += [f"{kind} {link.transfer:.3g} (latency {link.latency:.3g})" for kind, link in self.links.items()]
        factors = f"{', '.join(told)} times the time" if told else "no factor differs from 1"
        return f"by {self.source or 'an unknown source'}: {factors}"


UNCALIBRATED = Calibration(chip=None, matmul=1.0, attention=1.0, other=1.0, links={}, source=None)
