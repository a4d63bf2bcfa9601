"""Finds which communication of a scheduled program is exposed, and how long its step takes. No JAX here.

steps.py         what a program does, one thing after the other, and what a user says of its loops and branches
program.py       the module's text as such steps: every form in which a compiler writes a collective or a send
buffers.py       the arrays in memory, and which of them live at the peak
alike.py         devices that compute the same; collectives among stages in branches that not all of them take
kernels.py       what kernels of libraries compute and move
prices.py        how long compute takes: by the compiler's estimate, by its arithmetic, by the bytes that it moves
simulate.py      the steps in time, on one compute unit and the links
stage_clocks.py  the steps of a pipeline in time, on a clock for each stage
"""

from .simulate import CollectiveTotals, Simulation, simulate
from .steps import Collective

__all__ = ["Collective", "CollectiveTotals", "Simulation", "simulate"]
