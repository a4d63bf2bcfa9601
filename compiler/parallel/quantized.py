"""Matmuls whose operands are written in few bits: each is encoded, the elements are multiplied, and the result is
scaled.

    y  = sx sw (qx qw)        forward
    dx = sg sw (qg qw')       backward, the gradient g of y encoded in a type of gradients
    dw = sx sg (qx' qg)

Scales are constant along what each product sums (compiler/formats/operands.py), so they are taken out of the sum, and
whatever adds up partial results (a ring, the partitioner) adds up products of elements. The gradient of a rounding is
that of the identity: straight-through (Bengio et al. 2013, arXiv:1308.3432).

The largest magnitude of a tensor of tokens is that over all devices that have some of them, so that elements and scales
are the same on any mesh.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ..core.format import counted
from ..core.partition_spec import Axes
from ..core.scopes import encoding_scope
from ..formats.block import ELEMENTS, SCALES, EncodedArray, as_bits, from_bits, largest_magnitude
from ..formats.element import element_formats
from ..formats.operands import OperandFormat
from .partial_sums import find_partial_sum

INPUT, WEIGHT, GRADIENT = "input", "weight", "gradient"  # the operands of a site's three products
Dot = Callable[..., Array]  # (elements of x, elements of a weight, subscripts, result's type) -> products summed
SplitBy = Mapping[str, Axes]  # the mesh axes that split a dimension by hand, by its letter


@dataclass(frozen=True)
class Arithmetic:
    """How a site multiplies. forward: how x and the weight are written. gradients: how the gradient of the result is,
    in the backward pass; None: that is computed with x and the weight as they are. rounds_at_random: whether that
    gradient is rounded up or down at random. emulated: elements are decoded, and multiplied in float32. tokens: the
    mesh axes over which the tokens of x are split. columns: those over which devices have parts of a weight, and of the
    result, by hand. result_spec, gradient_spec: the layouts of the result and of the gradient of x over the axes of
    XLA's partitioner; None: it has none. watch: is given each operand's name and its scales while they are traced
    (overflow.py); None: nothing watches. history: the scales of operands come from so many steps before (delayed.py);
    None: from their magnitudes now."""

    forward: OperandFormat
    gradients: OperandFormat | None
    rounds_at_random: bool
    emulated: bool
    tokens: Axes
    columns: Axes = ()
    result_spec: PartitionSpec | None = None
    gradient_spec: PartitionSpec | None = None
    watch: Callable[[str, Array], None] | None = None
    history: int | None = None

    def encoded(self, operand: str, encoded: EncodedArray) -> EncodedArray:
        """Returns an operand as it was encoded. operand: INPUT, WEIGHT or GRADIENT."""
        if self.watch:
            scales = encoded[SCALES]  # what they share, if that is quantized in turn, is not finite where one is not
            self.watch(operand, scales[SCALES] if isinstance(scales, dict) else scales)
        return encoded

    @property
    def how(self) -> str:
        """Returns the types in words."""
        backward = "gradients as they are" if self.gradients is None else f"gradients in {self.gradients.how}"
        if self.gradients == self.forward:
            backward = "gradients too"
        at_random = ", rounded at random" if self.rounds_at_random else ""
        steps = f"; scales from the last {counted(self.history, 'step')}" if self.history else ""
        emulated = "; emulated: multiplied in float32" if self.emulated else ""
        return f"{self.forward.how}, {backward}{at_random}{steps}{emulated}"


@dataclass(frozen=True)
class SitePrecision:
    """The types of one site. arithmetic: how it multiplies; None: as its operands are. reason: why. gather: how its
    weights are written before they are gathered; None: they are not."""

    arithmetic: Arithmetic | None
    reason: str
    gather: OperandFormat | None = None

    @property
    def how(self) -> str:
        """Returns the types in words."""
        multiplied = self.arithmetic.how if self.arithmetic else "as their operands are"
        return f"{multiplied}; weights gathered in {self.gather.name}" if self.gather else multiplied


@dataclass(frozen=True)
class _Letters:
    """The subscripts of a product: "bte,em->btm" of x, a weight and their result."""

    x: str
    weight: str
    result: str

    @classmethod
    def of(cls, subscripts: str) -> "_Letters":
        operands, result = subscripts.split("->")
        x, weight = operands.split(",")
        return cls(x, weight, result)

    @property
    def forward(self) -> str:
        return f"{self.x},{self.weight}->{self.result}"

    @property
    def of_x(self) -> str:
        """Returns the subscripts of the gradient of x."""
        return f"{self.result},{self.weight}->{self.x}"

    @property
    def of_weight(self) -> str:
        """Returns the subscripts of the gradient of the weight."""
        return f"{self.x},{self.result}->{self.weight}"

    @property
    def tokens(self) -> str:
        """Returns the letters of dimensions that tokens have, and a weight has not."""
        return "".join(letter for letter in self.x if letter in self.result and letter not in self.weight)

    @property
    def columns(self) -> str:
        """Returns the letters of dimensions that a weight has, and x has not."""
        return "".join(letter for letter in self.weight if letter in self.result and letter not in self.x)


def dot(a: Array, b: Array, subscripts: str, dtype: Any) -> Array:
    """Returns a sum of products, as `jnp.einsum` writes it, of operands of any two types."""
    operands, result = subscripts.split("->")
    of_a, of_b = operands.split(",")
    both = [letter for letter in of_a if letter in of_b]
    summed = [letter for letter in both if letter not in result]
    batch = [letter for letter in both if letter in result]
    of_summed, of_batch = ((_places(each, of_a), _places(each, of_b)) for each in (summed, batch))
    y = jax.lax.dot_general(a, b, (of_summed, of_batch), preferred_element_type=dtype)
    made = [*batch, *(x for x in of_a if x not in both), *(x for x in of_b if x not in both)]
    order = [made.index(letter) for letter in result]
    return y if order == sorted(order) else jnp.transpose(y, order)


def _places(letters: Sequence[str], among: str) -> tuple[int, ...]:
    return tuple(among.index(each) for each in letters)


def scales_beside(scales: Array, letters: str, result: str) -> Array:
    """Returns the scales of an operand as they are broadcast beside a result, without what was contracted."""
    sizes = dict(zip(letters, scales.shape, strict=True))
    kept = [letter for letter in letters if letter in result]
    ordered = jnp.transpose(
        scales.reshape([sizes[letter] for letter in kept]), [kept.index(each) for each in result if each in kept]
    )
    return ordered.reshape([sizes.get(letter, 1) for letter in result])


@dataclass(frozen=True)
class Products:
    """How the three products of a site are made of elements: as `dot`. beside: makes of the scales of an operand what
    is multiplied with a result, from its letters and those of the result."""

    forward: Dot = dot
    of_x: Dot = dot
    of_weight: Dot = dot
    beside: Callable[[Array, str, str], Array] = scales_beside


def quantized_matmul(
    arithmetic: Arithmetic,
    x: Array,
    weight: Array,
    subscripts: str,
    *,
    forward: Dot = dot,
    encoded: EncodedArray | None = None,
    scales: Array | None = None,
) -> Array:
    """Returns the product of x and a weight. forward: multiplies elements in the forward pass, as `dot`. encoded: the
    weight, if it has come as encoded; its values are then not read. scales: of x, the weight and the gradient of the
    result (3,), whose gradient is the largest magnitudes of these on this device; None: scales come from magnitudes."""
    letters = _Letters.of(subscripts)
    split = dict.fromkeys(letters.tokens, arithmetic.tokens) | dict.fromkeys(letters.columns, arithmetic.columns)
    product = _Product(arithmetic, letters, lambda _: Products(forward), split)
    return _differentiable(product)(x, weight, encoded, None, scales)


def quantized_groups(
    arithmetic: Arithmetic,
    x: Array,
    weight: Array,
    sizes: Array | None,
    subscripts: str,
    *,
    products: Callable[[Any], Products],
    split: SplitBy,
    encoded: EncodedArray | None = None,
) -> Array:
    """Returns the product of rows and the matrix of their group. products: made from the sizes of the groups. split:
    the axes of every dimension that is split. encoded: as for `quantized_matmul`."""
    letters = _Letters.of(subscripts)
    product = _Product(arithmetic, letters, products, split, letters.weight[0])
    return _differentiable(product)(x, weight, encoded, sizes, None)


def _differentiable(product: "_Product") -> Callable[..., Array]:
    @jax.custom_vjp
    def multiply(
        x: Array, weight: Array, encoded: EncodedArray | None, sizes: Array | None, scales: Array | None
    ) -> Array:
        return product.forward(x, weight, encoded, sizes, scales)[0]

    def backward(residuals: Any, gradient: Array) -> tuple[Array, Array, None, None, Array | None]:
        x, weight, saved, *_, scales = residuals
        found = None
        if scales is not None:
            operands = (x, None if saved else weight, gradient)  # a weight that came as encoded has scales of its own
            found = jnp.stack([jnp.float32(0 if each is None else largest_magnitude(each)) for each in operands])
        return (*product.backward(residuals, gradient), None, None, found)

    multiply.defvjp(product.forward, backward)
    return multiply


def _one(scales: Array | None, place: int, x: Array) -> Array | None:
    """Returns one of a site's scales, as a tensor like x has it; None where there are none."""
    return None if scales is None else scales[place].reshape((1,) * x.ndim)


@dataclass(frozen=True)
class _Product:
    """products: made from the sizes of groups. split: mesh axes by letter. group: the letter of a weight's groups, each
    of which has channels of its own; empty: it has none."""

    arithmetic: Arithmetic
    letters: _Letters
    products: Callable[[Any], Products]
    split: SplitBy
    group: str = ""

    def forward(
        self, x: Array, weight: Array, encoded: EncodedArray | None, sizes: Array | None, delayed: Array | None
    ) -> tuple[Array, Any]:
        """Returns the result, and what the backward pass reads. Operands are saved as they are: a weight is gathered
        again, x is saved once for all sites that read it."""
        at, of, products = self.letters, self.arithmetic.forward, self.products(sizes)
        qx = self._encoded(of, x, at.x, at.forward, scales=_one(delayed, 0, x))
        qw = encoded or self._encoded(of, weight, at.weight, at.forward, scales=_one(delayed, 1, weight))
        of_result = self.arithmetic.result_spec
        y = self._multiplied(of, of, qx, qw, at.forward, x.dtype, products.forward, products.beside, of_result)
        is_used_again = of.scales == "tensor"  # whatever is contracted
        scales = (qx[SCALES], qw[SCALES]) if is_used_again else (None, None)
        saved = encoded and {**encoded, ELEMENTS: as_bits(encoded[ELEMENTS])}
        return y, (x, weight, saved, sizes, *scales, delayed)

    def backward(self, residuals: Any, gradient: Array) -> tuple[Array, Array]:
        """Returns the gradients of x and of the weight. residuals: as `forward` returned them."""
        x, weight, saved, sizes, sx, sw, delayed = residuals
        products = self.products(sizes)
        at, of, of_gradient = self.letters, self.arithmetic.forward, self.arithmetic.gradients
        if of_gradient is None:
            dx = products.of_x(gradient, weight, at.of_x, x.dtype)
            return dx, products.of_weight(x, gradient, at.of_weight, weight.dtype)
        sg = _one(delayed, 2, gradient)
        qg = self._encoded(of_gradient, gradient, at.result, at.of_x, scales=sg, is_gradient=True)
        has_same = of_gradient.scales == "tensor"
        qg2 = qg if has_same else self._encoded(of_gradient, gradient, at.result, at.of_weight, is_gradient=True)
        if saved is not None and of.scales == "tensor":
            qw = {**saved, ELEMENTS: from_bits(saved[ELEMENTS], element_formats()[of.element].dtype)}
        else:
            qw = self._encoded(of, weight, at.weight, at.of_x, scales=sw)
        qx = self._encoded(of, x, at.x, at.of_weight, scales=sx)
        dx = self._gradient_of_x(qg, qw, x.dtype, products)
        beside = products.beside
        dw = self._multiplied(of, of_gradient, qx, qg2, at.of_weight, weight.dtype, products.of_weight, beside)
        return dx, dw

    def _gradient_of_x(self, qg: EncodedArray, qw: EncodedArray, dtype: Any, products: Products) -> Array:
        """Returns the gradient of x. Other sites may add theirs to it, so parts of it are scaled before a sum over
        devices, where there is one."""
        arithmetic, at = self.arithmetic, self.letters
        of_gradient = arithmetic.gradients
        assert of_gradient is not None, "it is a product of elements"

        def product(qg: EncodedArray, qw: EncodedArray, spec: PartitionSpec | None = None) -> Array:
            of, beside, made = arithmetic.forward, products.beside, jnp.float32 if arithmetic.emulated else dtype
            return self._multiplied(of_gradient, of, qg, qw, at.of_x, made, products.of_x, beside, spec)

        of_result, of_x = arithmetic.result_spec, arithmetic.gradient_spec
        parts = None if of_result is None or of_x is None else find_partial_sum(at.of_x, of_result, of_x)
        dx = product(qg, qw, of_x) if parts is None else parts.added(product, qg, qw)
        return dx.astype(dtype)

    def _encoded(
        self, of: OperandFormat, x: Array, letters: str, product: str, *,
        scales: Any = None, is_gradient: bool = False,
    ) -> EncodedArray:  # fmt: skip
        """Returns an operand of a product, encoded."""
        kept, group = product.split("->")[1], self.group if letters == self.letters.weight else ""
        contracted = tuple(place for place, each in enumerate(letters) if each not in kept + group)
        format = of.of(x.ndim, contracted)
        spans = [letter for letter, size in zip(letters, format.block, strict=True) if size is None]
        axes = self._axes(spans)
        over = (lambda amax: jax.lax.pmax(amax, axes)) if axes else (lambda amax: amax)
        key = self._key(x, product) if is_gradient and self.arithmetic.rounds_at_random else None
        operand = GRADIENT if is_gradient else WEIGHT if letters == self.letters.weight else INPUT
        with jax.named_scope(encoding_scope(of.name)):
            encoded = format.encode(x, key=key, over_devices=over, scales=scales)
        return self.arithmetic.encoded(operand, encoded)

    def _axes(self, letters: Iterable[str]) -> Axes:
        """Returns the mesh axes that split any of these dimensions."""
        return tuple(dict.fromkeys(axis for letter in letters for axis in self.split.get(letter, ())))

    def _key(self, x: Array, product: str) -> Array:
        """Returns a key for the rounding of a gradient: other numbers have another one, so each step, layer and device
        rounds by itself, and the same step always rounds the same way."""
        bits = jax.lax.bitcast_convert_type(jnp.sum(x.astype(jnp.float32)), jnp.uint32)
        key = jax.random.fold_in(jax.random.key(zlib.crc32(product.encode())), bits)
        axes = self._axes(self.split)
        return jax.random.fold_in(key, jax.lax.axis_index(axes)) if axes else key

    def _multiplied(
        self,
        of_a: OperandFormat,
        of_b: OperandFormat,
        a: EncodedArray,
        b: EncodedArray,
        subscripts: str,
        dtype: Any,
        multiply: Dot,
        beside: Callable[[Array, str, str], Array],
        spec: PartitionSpec | None = None,
    ) -> Array:
        """Returns a product in the type of an operand. spec: its layout, which partial sums get before they are scaled:
        a reduce-scatter adds them, as it does without scales."""
        x, y = (self._factor(of, each) for of, each in ((of_a, a), (of_b, b)))
        summed = multiply(x, y, subscripts, jnp.float32 if self.arithmetic.emulated else dtype)
        summed = summed if spec is None else jax.lax.with_sharding_constraint(summed, spec)
        operands, result = subscripts.split("->")
        scales = [beside(q[SCALES], at, result) for q, at in zip((a, b), operands.split(","), strict=True)]
        return (summed.astype(jnp.float32) * (scales[0] * scales[1])).astype(dtype)

    def _factor(self, of: OperandFormat, encoded: EncodedArray) -> Array:
        """Returns elements as they are multiplied."""
        elements = encoded[ELEMENTS]
        return element_formats()[of.element].decode(elements) if self.arithmetic.emulated else elements
