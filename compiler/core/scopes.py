"""The names that operations carry from the step's code into the compiled program, written and parsed here only.

    with jax.named_scope(weight_scope("head/kernel_EV")): ...
      ->  jit(train_step)/transpose(jvp(head))/weight=head/kernel_EV/reduce_scatter
      ->  OperationName(...): the backward pass, a weight, of ["head/kernel_EV"]

JAX holds them as the stack of names of a jaxpr's equation, XLA as `op_name` of an instruction. JAX adds its
transformations: `jvp(..)` around what is differentiated, `transpose(jvp(..))` around its backward pass, and
`rematted_computation` before what the backward pass computes again. This file does not import JAX.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Pass = Literal["forward", "forward again", "backward", "update"]  # the parts of a step, in words of the report

ATTENTION = "attend"
UPDATE = "optimizer"
WORKING_PARAMETERS = "working_parameters"  # the cast of parameters to the compute type
_WEIGHT, _ROWS, _RING = "weight=", "rows=", "ring="

_PARAMETER = re.compile(rf"(?:{_WEIGHT}|{_ROWS})([\w/.]+)")
_WEIGHT_GATHER = re.compile(rf"{_WEIGHT}.*all_gather")
_ACTIVATION = re.compile(rf"{_RING}(\w+)")
_JOINED = re.compile(r"\(([^()]*:[^()]*)\)")
_SEPARATORS = re.compile(r"[/()\s]+")


def piece_scope(name: str) -> str:
    """The scope of a piece of the model: `embed`, `head`, or a stack of layers by its name."""
    return name


def weight_scope(path: str) -> str:
    """The scope of what moves a parameter, or reduces its gradient."""
    return f"{_WEIGHT}{path}"


def rows_scope(path: str) -> str:
    """The scope of what exchanges rows of an embedding table."""
    return f"{_ROWS}{path}"


def ring_scope(activation: str) -> str:
    """The scope of a matmul that sums its result in a ring, by the activation that it makes."""
    return f"{_RING}{activation}"


def nested(outer: str, inner: str) -> str:
    """The names of an operation within another: either may be empty."""
    return "/".join(filter(None, (outer, inner)))


@dataclass(frozen=True)
class OperationName:
    """The names of one operation, or of several that XLA has made one of."""

    text: str

    @property
    def in_pass(self) -> Pass:
        """The part of the step that it belongs to."""
        if "rematted_computation" in self.text:
            return "forward again"
        if self.is_transposed:
            return "backward"
        return "update" if self.is_update else "forward"

    @property
    def is_differentiated(self) -> bool:
        """True in the forward and the backward pass of what a gradient is taken of."""
        return "jvp(" in self.text

    @property
    def is_transposed(self) -> bool:
        """True in the backward pass, for what it computes again too."""
        return "transpose(" in self.text

    @property
    def is_update(self) -> bool:
        """True in the update by the optimizer."""
        return self._is_within(UPDATE)

    @property
    def is_attention(self) -> bool:
        """True within the attention of a layer."""
        return self._is_within(ATTENTION)

    @property
    def is_cast_of_parameters(self) -> bool:
        """True where parameters are cast to the compute type."""
        return WORKING_PARAMETERS in self.text

    @property
    def gathers_weight(self) -> bool:
        """True for the all-gather of a parameter."""
        return _WEIGHT_GATHER.search(self.text) is not None

    @property
    def reduces_gradient(self) -> bool:
        """True for what reduces the gradient of a parameter, or makes it ready for that."""
        return _WEIGHT in self.text and not self.gathers_weight

    @property
    def ring(self) -> str | None:
        """The activation whose matmul sums it in a ring; None elsewhere."""
        found = _ACTIVATION.search(self.text)
        return found[1] if found else None

    @property
    def last(self) -> str:
        """The operation itself: JAX's primitive."""
        return self.text.rpartition("/")[2].rstrip(")")

    @property
    def words(self) -> tuple[str, ...]:
        """The names in order, each transformation a word by itself: 'transpose(jvp(head))/add' -> transpose, jvp, head,
        add."""
        return tuple(filter(None, _SEPARATORS.split(self.text)))

    @property
    def first_scope(self) -> str | None:
        """The outermost name without its transformations: 'transpose(jvp(head))/add' -> 'head'."""
        first = next(filter(None, self.text.split("/")), None)
        return first and first.removeprefix("transpose(").removeprefix("jvp(").rstrip(")")

    @property
    def separated(self) -> tuple["OperationName", ...]:
        """The names of each operation that XLA joined, which it writes by their common parts: 'a/(b/x:c/x)' -> 'a/b/x',
        'a/c/x'."""
        joined = _JOINED.search(self.text)
        if not joined:
            return tuple(map(OperationName, self.text.split(":")))
        before, after = self.text[: joined.start()], self.text[joined.end() :]
        return tuple(OperationName(f"{before}{part}{after}") for part in joined[1].split(":"))

    def parameters(self, paths: Sequence[str]) -> tuple[str, ...]:
        """Those of these parameters that it moves, whose gradients it reduces or whose rows it exchanges, in order.

        The known paths are needed, as the name goes on after a path: 'weight=head/kernel_EV/shard_map/all_gather'.
        """
        found = (_PARAMETER.search(each.text) for each in self.separated)
        return tuple(path for match in found for path in paths if match and f"{match[1]}/".startswith(f"{path}/"))

    def _is_within(self, scope: str) -> bool:
        return f"/{scope}/" in f"/{self.text}/"
