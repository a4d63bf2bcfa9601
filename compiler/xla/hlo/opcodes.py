"""Describes how opcodes of XLA use their operands, in one table for all walks over a program.

A walk asks for one of these properties, and takes a set of opcodes by its name:

VIEWS      the elements of its first operand, in another shape, order, layout or memory, or a moment later
CASTS      likewise, in another type
NAMES      the memory of its first operand under another name: nothing is written
PARTS      a part of its first operand, and it reads no more than that
IN_PLACE   its first operand, of which it overwrites a part
FREE       no work for the compute unit: names of values, and copies between memories

Views and names differ: a copy is a view, and an array of its own in memory. A reshape is a view that moves nothing
within a fusion (NAMES_IN_FUSION), but on TPUs, outside of fusions, it writes the array again in other tiles.
PARTS has `gather`, which reads the rows that it takes, and BLOCKS has not: data says which rows, so that a device needs
the whole array to take them from.
"""

from enum import Flag, auto

from ...core.traffic import CollectiveKind


class Does(Flag):
    """The properties of an opcode, as above."""

    VIEW = auto()
    CAST = auto()
    NAME = auto()
    PART = auto()
    BLOCK = auto()
    IN_PLACE = auto()
    FREE = auto()


_NAMED = Does.VIEW | Does.NAME | Does.FREE
TABLE = {
    "add-dependency": _NAMED,
    "after-all": Does.FREE,
    "all-gather-done": Does.VIEW,
    "all-reduce-done": Does.VIEW | Does.NAME,
    "async-done": Does.VIEW,
    "async-update": Does.VIEW | Does.NAME,
    "bitcast": _NAMED,
    "call-done": Does.VIEW,
    "call-update": Does.VIEW | Does.NAME,
    "collective-permute-done": Does.VIEW,
    "constant": Does.FREE,
    "convert": Does.CAST,
    "copy": Does.VIEW,
    "copy-done": Does.VIEW | Does.FREE,
    "copy-start": Does.VIEW | Does.FREE,
    "domain": _NAMED,
    "dynamic-slice": Does.PART | Does.BLOCK,
    "dynamic-slice-done": Does.FREE,
    "dynamic-slice-start": Does.FREE,
    "dynamic-update-slice": Does.IN_PLACE,
    "dynamic-update-slice-done": Does.FREE,
    "dynamic-update-slice-start": Does.FREE,
    "gather": Does.PART,
    "get-tuple-element": Does.FREE,
    "iota": Does.FREE,
    "opt-barrier": _NAMED,
    "parameter": Does.FREE,
    "partition-id": Does.FREE,
    "reduce-precision": Does.CAST,
    "replica-id": Does.FREE,
    "reshape": Does.VIEW,
    "scatter": Does.IN_PLACE,
    "slice": Does.PART | Does.BLOCK,
    "slice-done": Does.FREE,
    "slice-start": Does.FREE,
    "transpose": Does.VIEW,
    "tuple": Does.FREE,
}

# The collectives, each without the `-start` of its asynchronous form.
COLLECTIVES: dict[str, CollectiveKind] = {
    "all-gather": "all-gather",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
    "collective-broadcast": "collective-broadcast",
    "collective-permute": "collective-permute",
    "ragged-all-to-all": "all-to-all",
    "reduce-scatter": "reduce-scatter",
    "send": "send",
}


def all_that(does: Does) -> frozenset[str]:
    """Returns the opcodes with a property."""
    return frozenset(opcode for opcode, each in TABLE.items() if does in each)


VIEWS, CASTS, NAMES = all_that(Does.VIEW), all_that(Does.CAST), all_that(Does.NAME)
PARTS, BLOCKS, IN_PLACE, FREE = all_that(Does.PART), all_that(Does.BLOCK), all_that(Does.IN_PLACE), all_that(Does.FREE)
SAME_ELEMENTS = VIEWS | CASTS
# Each element of the result is computed from the elements at its place.
ELEMENTWISE = frozenset([
    "abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "compare", "convert", "cosine", "divide", "erf",
    "exponential", "exponential-minus-one", "floor", "log", "log-plus-one", "logistic", "maximum", "minimum",
    "multiply", "negate", "not", "or", "popcnt", "power", "remainder", "round-nearest-afz", "round-nearest-even",
    "rsqrt", "select", "shift-left", "shift-right-arithmetic", "shift-right-logical", "sign", "sine", "sqrt",
    "subtract", "tan", "tanh", "xor",
])  # fmt: skip
UNCHANGED = NAMES | {"copy", "copy-done", "copy-start"}  # views that keep the order of the elements
NAMES_IN_FUSION = NAMES | {"reshape"}


_READING = SAME_ELEMENTS | NAMES | PARTS | IN_PLACE | {"conditional", "get-tuple-element", "while"}


def least_operands(opcode: str) -> int:
    """Returns the number of operands without which an opcode means nothing; 0 where it may have none."""
    base = opcode.removesuffix("-start")
    if base == "dynamic-update-slice":
        return 2
    is_end = opcode.endswith("-done") and not opcode.startswith(("async", "call"))
    return int(is_end or base in _READING)


def collective_kind(opcode: str) -> CollectiveKind | None:
    """Returns the kind of the collective that an opcode is or starts; None for any other opcode."""
    return COLLECTIVES.get(opcode.removesuffix("-start"))
