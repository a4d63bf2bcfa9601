"""Scheduled programs of XLA, read back from their text. No JAX here: text in, frozen values out.

parse.py     the text, as a module of computations of instructions
types.py     types of values: bytes of arrays and tuples
groups.py    replica groups, as lists of devices
opcodes.py   what each opcode does with its operands
flow.py      where values come from, where they go, and how often loops run
"""

from .parse import Computation, HloError, Instruction, Module, module_name, parse_module, split_modules

__all__ = ["Computation", "HloError", "Instruction", "Module", "module_name", "parse_module", "split_modules"]
