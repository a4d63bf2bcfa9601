"""The names that operations carry from the step's code into the compiled program, written and parsed here only.

    with jax.named_scope(weight_scope("head/kernel_EV")): ...
      ->  jit(train_step)/transpose(jvp(head))/weight=head/kernel_EV/reduce_scatter
      ->  OperationName(...): the backward pass, a weight, of ["head/kernel_EV"]

JAX stores them as the name stack of a jaxpr's equation, XLA as the `op_name` of an instruction. JAX adds its
transformations: `jvp(..)` around what is differentiated, `transpose(jvp(..))` around its backward pass, and
`rematted_computation` before what the backward pass recomputes. This file does not import JAX.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Pass = Literal["forward", "recomputed", "backward", "update"]  # the parts of a step, as the report names them

ATTENTION = "attend"
UPDATE = "optimizer"
SUM_OF = "sum of "
WORKING_PARAMETERS = "working_parameters"  # the cast of parameters to the compute type
_WEIGHT, _ROWS = "weight", "rows"
MATMUL, LAYOUT = "matmul", "layout"
ENCODED = "encoded"
FILLED = "filled"  # of the rows of experts' buffers, by tokens
TILE_ROWS, TILE_TIME = "tile_rows", "tile_time"  # of grouped matmuls' tiles, where they are not the largest
RAGGED_ROWS = "ragged_rows"  # of the tiles of XLA's own kernel, where they are not the smallest
SENT = "sent"  # of the rows of a ragged exchange, in its smaller buffer
_AT_MOST_ONCE = "at_most_once"
SLOT, END, SHARED_END, BUFFER = "slot", "end", "shared_end", "buffer"
End = Literal["first", "last"]  # the ends of a pipeline: the virtual stage of the embedding, and that of the head

_PARAMETER = re.compile(rf"(?:{_WEIGHT}|{_ROWS})=([\w/.]+)")
_WEIGHT_GATHER = re.compile(rf"{_WEIGHT}=.*all_gather")
_FACT = re.compile(r"(?<!\w)(\w+)=([\w.]+)")
_ADDED = frozenset({
    _AT_MOST_ONCE, "body", "checkpoint", "closed_call", "cond", "jit", "jvp", "rematted_computation", "shard_map",
    "train_step", "transpose", "while",
})  # fmt: skip
_JOINED = re.compile(r"\(([^()]*:[^()]*)\)")
_SEPARATORS = re.compile(r"[/()\s]+")


class RowTile(NamedTuple):
    """A tile of rows of grouped matmuls. time: of a matmul in such tiles, over that in the largest. ragged: the rows of
    a tile in XLA's own kernel for TPUs, which XLA chooses."""

    rows: int
    time: float
    ragged: int = 128


LARGEST_TILE = RowTile(512, 1.0)


def piece_scope(name: str) -> str:
    """Returns the scope of a component of the model: `embed`, `head`, or a stack of layers by its name."""
    return name


def fact_scope(key: str, value: str) -> str:
    """Returns the scope that tells one fact of the operations within it: 'ring=mlp_output'."""
    return f"{key}={value}"


def weight_scope(path: str) -> str:
    """Returns the scope of the collectives that gather a parameter or reduce its gradient."""
    return fact_scope(_WEIGHT, path)


def rows_scope(path: str) -> str:
    """Returns the scope of the all-to-alls of an embedding lookup."""
    return fact_scope(_ROWS, path)


def layout_scope(activation: str) -> str:
    """Returns the scope of what brings an activation, and in the backward pass its gradient, into its layout."""
    return fact_scope(LAYOUT, activation)


def slot_scope(operation: str) -> str:
    """Returns the scope of the conditional around one slot of a pipeline's tick, by the operation of its table:
    'slot=F'. On each stage its branch is chosen by the table, and by nothing else."""
    return fact_scope(SLOT, operation)


def at_most_once_scope() -> str:
    """Returns the scope of a loop of one trip or none, which chooses as a conditional does: its body, or nothing."""
    return _AT_MOST_ONCE


def end_scope(end: End) -> str:
    """Returns the scope of a conditional within a slot that runs on one end of a pipeline alone: 'end=last'."""
    return fact_scope(END, end)


def shared_end_scope(end: End) -> str:
    """Returns the scope of a conditional, within `slot_scope`, that all stages run while one end of a pipeline runs the
    operation, such as a head that is split over the stages: 'shared_end=last'."""
    return fact_scope(SHARED_END, end)


def buffer_scope(name: str) -> str:
    """Returns the scope in which a buffer of a pipeline's stages is made: 'buffer=saved'."""
    return fact_scope(BUFFER, name)


def tile_scope(tile: RowTile) -> str:
    """Returns the scope of grouped matmuls with such tiles of rows: 'tile_rows=256/tile_time=1.3'. The largest and the
    smallest ragged one go without saying."""
    own = [fact_scope(TILE_ROWS, str(tile.rows)), fact_scope(TILE_TIME, f"{tile.time:g}")]
    is_largest = (tile.rows, tile.time) == (LARGEST_TILE.rows, LARGEST_TILE.time)
    ragged = [] if tile.ragged == LARGEST_TILE.ragged else [fact_scope(RAGGED_ROWS, str(tile.ragged))]
    return "/".join([*([] if is_largest else own), *ragged])


def encoding_scope(format: str) -> str:
    """Returns the scope in which an operand of a matmul is written in few bits: 'encoded=fp8'."""
    return fact_scope(ENCODED, format)


def is_sum_of_matmul(activation: str) -> bool:
    """Returns whether an activation (`OperationName.activation`) is made of parts of a matmul that devices add."""
    return activation.startswith(SUM_OF)


def nested_scope(outer: str, inner: str) -> str:
    """Returns the names of an operation within another. Either may be empty."""
    return "/".join(filter(None, (outer, inner)))


@dataclass(frozen=True)
class OperationName:
    """The names of one operation, or of several that XLA merged into one."""

    text: str

    @property
    def in_pass(self) -> Pass:
        """Returns the part of the step that it belongs to."""
        if "rematted_computation" in self.text:
            return "recomputed"
        if self.is_transposed:
            return "backward"
        return "update" if self.is_update else "forward"

    @property
    def is_differentiated(self) -> bool:
        """Returns True in the forward and the backward pass of differentiated code."""
        return "jvp(" in self.text

    @property
    def is_transposed(self) -> bool:
        """Returns True in the backward pass, including what it recomputes."""
        return "transpose(" in self.text

    @property
    def is_update(self) -> bool:
        """Returns True in the optimizer's update."""
        return self._is_within(UPDATE)

    @property
    def is_attention(self) -> bool:
        """Returns True within the attention of a layer."""
        return self._is_within(ATTENTION)

    @property
    def is_cast_of_parameters(self) -> bool:
        """Returns True where parameters are cast to the compute type."""
        return WORKING_PARAMETERS in self.text

    @property
    def gathers_weight(self) -> bool:
        """Returns True for the all-gather of a parameter."""
        return _WEIGHT_GATHER.search(self.text) is not None

    @property
    def reduces_gradient(self) -> bool:
        """Returns True for what reduces the gradient of a parameter, or prepares it for that."""
        return f"{_WEIGHT}=" in self.text and not self.gathers_weight

    def fact(self, key: str) -> str | None:
        """Returns the value of a fact that a scope tells (`fact_scope`); None where none does."""
        return next((found[2] for found in _FACT.finditer(self.text) if found[1] == key), None)

    @property
    def filled_share(self) -> float:
        """Returns the share of the rows of experts' buffers that tokens fill; 1 where no scope tells it."""
        return float(self.fact(FILLED) or 1.0)

    @property
    def row_tile(self) -> RowTile:
        """Returns the tile of rows of grouped matmuls, the largest where nothing says another."""
        rows, time, ragged = self.fact(TILE_ROWS), self.fact(TILE_TIME), self.fact(RAGGED_ROWS)
        tile = RowTile(int(rows), float(time)) if rows and time else LARGEST_TILE
        return tile._replace(ragged=int(ragged)) if ragged else tile

    @property
    def sent_share(self) -> float:
        """Returns the share of the smaller buffer of a ragged exchange that is sent on average; 1 where no scope tells
        it."""
        return float(self.fact(SENT) or 1.0)

    @property
    def is_at_most_once(self) -> bool:
        """Returns True for the loop that `at_most_once_scope` names, and not for what is in it."""
        return self.text.removesuffix("/while").endswith(_AT_MOST_ONCE)

    @property
    def slot(self) -> str | None:
        """Returns the operation of the slot of a pipeline's tick that it is in: 'F'."""
        return self.fact(SLOT)

    @property
    def end(self) -> str | None:
        """Returns the end of a pipeline, 'first' or 'last', on which alone it runs within its slot."""
        return self.fact(END)

    @property
    def shared_end(self) -> str | None:
        """Returns the end of a pipeline, 'first' or 'last', while whose slot it runs on all stages."""
        return self.fact(SHARED_END)

    @property
    def buffer(self) -> str | None:
        """Returns the buffer of a pipeline's stages that it makes: 'saved'."""
        return self.fact(BUFFER)

    @property
    def activation(self) -> str | None:
        """Returns what the partitioner's collectives for an operation move: 'attention_input' where that is brought
        into its layout, 'sum of attention_output' where devices add their parts of a matmul; None for others."""
        laid_out, matmul = self.fact(LAYOUT), self.fact(MATMUL)
        return laid_out if laid_out or not matmul else f"{SUM_OF}{matmul}"

    @property
    def last(self) -> str:
        """Returns the operation's own name: the JAX primitive."""
        return self.text.rpartition("/")[2].rstrip(")")

    @property
    def words(self) -> tuple[str, ...]:
        """Returns the names in order, each transformation as a separate word: 'transpose(jvp(head))/add' -> transpose,
        jvp, head, add."""
        return tuple(filter(None, _SEPARATORS.split(self.text)))

    @property
    def own(self) -> str:
        """Returns the scopes of the code, without what JAX adds: 'jit(train_step)/transpose(jvp(layers))/while/body/
        attend/dot_general' -> 'layers/attend/dot_general'."""
        return "/".join(word for word in self.words if word not in _ADDED)

    @property
    def of_loop(self) -> str | None:
        """Returns the innermost scope around the innermost loop that it is in: 'jit(train_step)/transpose(jvp(layers))/
        while/body/add' -> 'layers'; None where it is in none."""
        around, loop, _ = self.text.rpartition("/while/")
        return OperationName(around).own.rpartition("/")[2] if loop else None

    @property
    def first_scope(self) -> str | None:
        """Returns the outermost name without its transformations: 'transpose(jvp(head))/add' -> 'head'."""
        first = next(filter(None, self.text.split("/")), None)
        return first and first.removeprefix("transpose(").removeprefix("jvp(").rstrip(")")

    @property
    def separated(self) -> tuple["OperationName", ...]:
        """Returns the names of each operation that XLA merged; it factors out their common parts: 'a/(b/x:c/x)' ->
        'a/b/x', 'a/c/x'."""
        joined = _JOINED.search(self.text)
        if not joined:
            return tuple(map(OperationName, self.text.split(":")))
        before, after = self.text[: joined.start()], self.text[joined.end() :]
        return tuple(OperationName(f"{before}{part}{after}") for part in joined[1].split(":"))

    def parameters(self, paths: Sequence[str]) -> tuple[str, ...]:
        """Returns the parameters, in order, that it gathers, whose gradients it reduces or whose rows it exchanges.

        The known paths are needed because the name continues after a path:
        'weight=head/kernel_EV/shard_map/all_gather'.
        """
        found = (_PARAMETER.search(each.text) for each in self.separated)
        return tuple(path for match in found for path in paths if match and f"{match[1]}/".startswith(f"{path}/"))

    def _is_within(self, scope: str) -> bool:
        return f"/{scope}/" in f"/{self.text}/"
