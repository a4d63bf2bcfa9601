"""One mechanism for every operation that can run over the mesh in several ways.

    OpSite      one place where the model does an operation, with its operands
    Strategy    one way to run it there: its collectives and its cost, or why it cannot run
    OpPlan      the strategy that was chosen for a site, those that were rejected, and the reason

choose.py asks each operation of a registry (registry.py) for its strategies at each of its sites, and settles them: by
name where the declaration names one (`parallel.matmul=collective_matmul`), else by cost. Whatever shows or uses the
decision (explain, plan.json, the lint, the search, the step) is a loop over `Plan.operations`, so a new operation is
one file, one line in the registry, and its key in `conf/parallel/`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

import jax

from meshloom.models import Model

from ..core.errors import Problem
from ..core.kernels import KernelCall, KernelCost
from ..core.partition_spec import Axes
from ..core.scopes import OperationName, Pass, fact_scope
from ..core.traffic import AxisGroups, CollectiveKind, ComputeKind, DeviceTraffic, Traffic, TrafficSource
from ..sharding.arrays import Arrays, Operand, OpSite
from ..sharding.batch import BatchPlan
from ..sharding.roles import AxisRoles
from ..sharding.rules import ArrayPlan
from ..sharding.sharding import ShardingPlan
from ..spec.overlap_spec import StrategyChoice
from ..spec.plan_spec import PlanSpec
from ..spec.step_spec import StepSpec
from ..target.mesh import MeshPlan
from ..target.target import TargetPlan
from .quantized import SitePrecision

# How a strategy wants the weights of its site: whole where the piece begins, in chunks of the vocabulary, or as shards.
WeightUse = Literal["gathered", "chunked", "sharded"]
Lowered = Callable[..., jax.Array]  # takes what the model handed to `Context.operation`: operands and options


def moved(
    kind: CollectiveKind, mesh_axes: Axes, group_size: int, bytes_each: int, count: int, in_pass: Pass,
    groups: AxisGroups | None = None,
) -> DeviceTraffic:  # fmt: skip
    """Returns a collective that one execution of an operation runs so many times. groups: as of `DeviceTraffic`."""
    origin = TrafficSource(in_pass=in_pass)
    return DeviceTraffic(kind, mesh_axes, group_size, bytes_each * count, count, origin=origin, groups=groups)


@dataclass(frozen=True)
class Cost:
    """The cost of a strategy that nothing hides. Costs compare only where their units agree."""

    value: float
    unit: Literal["seconds", "bytes"]


@dataclass(frozen=True)
class Refusal:
    """The reason why a strategy is not used at a site.

    why: the reason, in words. is_hard: it cannot run there; else `auto` leaves it out, and it runs by name. instead:
    the strategy to name in its place; empty: the operation's fallback. loss: what is lost without it, for the lint;
    empty: nothing that a user has to know.
    """

    why: str
    is_hard: bool = True
    instead: str = ""
    loss: str = ""

    def sentence(self, name: str) -> str:
        """Returns the reason as a sentence on the strategy of this name."""
        lost = f"{self.loss}: " if self.loss else ""
        return f"{lost}{name} is not used: {self.why}"


def refused(why: str | None, *, is_hard: bool = True, instead: str = "", loss: str = "") -> Refusal | None:
    """Returns a refusal with this reason; None where there is none."""
    return None if why is None else Refusal(why, is_hard, instead, loss)


@dataclass(frozen=True)
class Strategy:
    """One way to run an operation at a site.

    what: the strategy in words, for `explain`: "rows exchanged over fsdp".
    parameters: the values that its implementation needs, frozen.
    cost: None where it is not known; then strategies are preferred in the order in which they are given.
    reason: why it is chosen, such as what its cost is made of.
    refusal: why it is not used here; None: it may be.
    is_trivial: `explain` has nothing to show of a site that is run so.
    weights: how it gets at the weights of its site (weight_plan.py), whatever its name.
    num_trips: how many times a loop of its own runs; 1: it has none.
    has_spare_room: its buffers have room for any imbalance, so that the usual one leaves some of it empty.
    """

    name: str
    what: str
    parameters: Any = None
    collectives: tuple[Traffic, ...] = ()
    cost: Cost | None = None
    reason: str = ""
    refusal: Refusal | None = None
    is_trivial: bool = False
    weights: WeightUse = "gathered"
    num_trips: int = 1
    has_spare_room: bool = False

    @property
    def can_run(self) -> bool:
        """Returns True where it may be named, although `auto` may leave it out."""
        return self.refusal is None or not self.refusal.is_hard

    @property
    def why_not(self) -> str | None:
        """Returns why it is not used, in words; None: it may be."""
        return self.refusal.why if self.refusal else None


@dataclass(frozen=True)
class Exposed:
    """The part of a site's collectives that a layer waits for. share: at least this part of their time.
    is_beside_attention: they run beside the kernels of attention in their loop, and what takes longer than those is
    waited for, too."""

    share: float
    is_beside_attention: bool = False


@dataclass(frozen=True)
class OpPlan:
    """The way in which one site is run. op: the operation. is_auto: the declaration left the choice to the plan.
    precision: the types in which it multiplies; None without rules for them, and where it multiplies no weight."""

    op: "ParallelOp"
    site: OpSite
    chosen: Strategy
    rejected: tuple[Strategy, ...]
    reason: str
    is_auto: bool
    precision: SitePrecision | None = None

    @property
    def has_choice(self) -> bool:
        """Returns True where more than one strategy could run."""
        return any(each.can_run for each in self.rejected)

    @property
    def missed(self) -> str | None:
        """Returns a sentence on a strategy that `auto` would have taken and whose refusal costs something; None where
        there is none."""
        refusals = [(each.name, each.refusal) for each in self.rejected if self.is_auto and not each.can_run]
        return next((refusal.sentence(name) for name, refusal in refusals if refusal and refusal.loss), None)

    @property
    def how(self) -> str:
        """Returns what runs and why, in words."""
        return f"{self.chosen.what}: {self.reason}"


@dataclass(frozen=True)
class OpInputs:
    """The values that strategies are made from. after: plans of the operations that `ParallelOp.after` names, in
    order."""

    spec: PlanSpec
    model: Model
    arrays: Arrays
    sharding: ShardingPlan
    mesh: MeshPlan
    batch: BatchPlan
    target: TargetPlan
    after: tuple[tuple[OpPlan, ...], ...] = ()

    @property
    def roles(self) -> AxisRoles:
        """Returns what each mesh axis splits."""
        return self.sharding.roles

    @property
    def why_no_ring(self) -> str | None:
        """Returns why an operation cannot send its operands around in a ring; None if it can."""
        if not self.roles.stage:
            return None
        return "its permutes span every stage, and stages do not reach it at the same time"

    def activation(self, name: str | None) -> ArrayPlan | None:
        """Returns the layout of the activation of this name; None where the model has none of this name."""
        return next((plan for plan in self.sharding.activations if plan.array.path == name), None)


@dataclass(frozen=True)
class NewestTokens:
    """The tokens that are generated next, one or more of each sequence. slots_T: their slots of the cache. padding_B:
    how many of the first slots of each sequence are padding. num_slots: the length of the cache."""

    slots_T: jax.Array
    padding_B: jax.Array
    num_slots: int


class ParallelOp(ABC):
    """One operation: its strategies at a site, and the function that runs a chosen one.

    kind: its key in `parallel`, and the first argument of `Context.operation`. title: what `explain` calls it.
    fallback: the strategy that can always run. is_declared: it has a key in `parallel`; others are always `auto`.
    after: the kinds whose plans its strategies are made from; they come before it in the registry. beside_compute: the
    strategies whose collectives run beside the operation's own arithmetic, with the passes over memory that each byte
    costs that they send. passes_over_rows: whether its passes over memory move whole rows, at the
    rate of large kernels.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    names: ClassVar[tuple[str, ...]]
    fallback: ClassVar[str]
    is_declared: ClassVar[bool] = True
    after: ClassVar[tuple[str, ...]] = ()
    beside_compute: ClassVar[Mapping[str, int]] = {}
    passes_over_rows: ClassVar[bool] = False

    def sites(self, inputs: OpInputs) -> Sequence[OpSite]:
        """Returns where the operation is done: by default, where the traced model asked for it."""
        return [site for site in inputs.arrays.sites if site.kind == self.kind]

    @abstractmethod
    def strategies(self, site: OpSite, inputs: OpInputs) -> Sequence[Strategy]:
        """Returns all ways to run it at a site, the preferred one first; the fallback is among them and is never
        refused."""

    def problems(self, inputs: OpInputs, plans: Sequence[OpPlan]) -> Sequence[Problem]:
        """Returns the mistakes in keys outside of `parallel` that say how the operation runs. plans: those of its
        sites."""
        return ()

    def multiplied(self, site: OpSite) -> Sequence[Operand]:
        """Returns the weights that a site multiplies with, whose products may be in few bits (`OpPlan.precision`)."""
        return ()

    def summed_dims(self, site: OpSite) -> tuple[int, ...]:
        """Returns the dimensions of the weights of `multiplied` that the forward pass sums over."""
        return ()

    def why_not_few_bits(self, plan: OpPlan, target: TargetPlan) -> str | None:
        """Returns why a site that multiplies weights cannot do so in few bits on a target, whatever its type; None
        where it can."""
        return None

    def lower(self, plan: OpPlan) -> Lowered | None:
        """Returns the function that runs the chosen strategy; None: the model's own plain function."""
        return None

    def per_token(self, plain: Lowered, *operands: Any, **options: Any) -> Any:
        """Returns arrays of the shapes of `plain`, whose entries each token makes from its own operands.

        An operation that looks at other tokens, and exchanges them by itself where a sequence is split, overrides it.
        """
        return plain(*operands, **options)

    def with_cache(self, tokens: NewestTokens, name: str, plain: Lowered, *operands: Any, **options: Any) -> Any:
        """Returns what `plain` does for the newest tokens, where operands passed through `Context.remember` hold those
        of all slots of the cache. name: that of the site.

        An operation that looks at other tokens overrides it.
        """
        return plain(*operands, **options)

    def scope(self, plan: OpPlan) -> str | None:
        """Returns the scope that the operations of a site carry into the compiled program; None: they carry none."""
        return fact_scope(self.kind, plan.site.name)

    def compute_kind(self, name: OperationName, *, is_pallas: bool) -> ComputeKind | None:
        """Returns the kind under which compute of this name is shown and calibrated; None: that of the instruction by
        itself. is_pallas: it is a kernel that is written in Pallas."""
        return None

    def kernel_cost(self, call: KernelCall) -> KernelCost | None:
        """Returns the cost of one call of a kernel of the operation, in a traced or a compiled program; None for the
        kernels of others, and for those whose cost their program states."""
        return None

    def masked_share(self, spec: StepSpec, *operands: Any, **options: Any) -> Fraction:
        """Returns the share of the products of its plain function that a mask makes needless. operands, options: what
        the model hands to `Context.operation`."""
        return Fraction(0)

    def weight_use(self, plan: OpPlan, weight: ArrayPlan) -> WeightUse | None:
        """Returns how a site gets at a parameter; None for one that is not the operation's to say."""
        return None

    def hiding(self, plan: OpPlan, target: TargetPlan) -> Exposed | None:
        """Returns the exposed share of this site's collectives, or None to use the default for activations."""
        return None

    def candidates(self, plans: Sequence[OpPlan]) -> Sequence[StrategyChoice]:
        """Returns the choices for its sites that `overlap.search` tries, the plan's first; empty: it tries none."""
        return ()

    def small_keys(self, plans: Sequence[OpPlan]) -> Mapping[str, tuple[Any, str]]:
        """Returns the keys that a small declaration like this one has otherwise, so that it computes the same on any
        mesh, each with its value and the reason. plans: those of its sites."""
        return {}

    def source(self, name: OperationName) -> str | None:
        """Returns what a collective of the operation moves, for tables, by its name; None for collectives of others."""
        site = name.fact(self.kind)
        return f"{self.title} {site}" if site else None


def lower_operations(plans: Iterable[OpPlan], piece: str) -> Lowered:
    """Returns the `Context.operation` of a piece of the model: it runs each site by the strategy that was chosen for
    it, in its scope."""
    own = (plan for plan in plans if plan.site.piece == piece)
    lowered = {(plan.site.kind, plan.site.name): (plan.op.scope(plan), plan.op.lower(plan)) for plan in own}

    def operation(kind: str, name: str, plain: Lowered, *operands: Any, **options: Any) -> jax.Array:
        scope, run = lowered.get((kind, name), (None, None))
        with jax.named_scope(scope) if scope else nullcontext():
            return (run or plain)(*operands, **options)

    return operation


def per_token_operation(ops: Iterable[ParallelOp]) -> Lowered:
    """Returns the `Context.operation` without what operations exchange between tokens: for the check that nothing else
    does."""
    by_kind = {op.kind: op for op in ops}

    def operation(kind: str, name: str, plain: Lowered, *operands: Any, **options: Any) -> Any:
        del name
        op = by_kind.get(kind)
        return op.per_token(plain, *operands, **options) if op else plain(*operands, **options)

    return operation


def cached_operation(ops: Iterable[ParallelOp], tokens: NewestTokens) -> Lowered:
    """Returns the `Context.operation` in which the newest tokens read earlier ones from a cache."""
    by_kind = {op.kind: op for op in ops}

    def operation(kind: str, name: str, plain: Lowered, *operands: Any, **options: Any) -> Any:
        op = by_kind.get(kind)
        return op.with_cache(tokens, name, plain, *operands, **options) if op else plain(*operands, **options)

    return operation


def exposed_by_source(plans: Iterable[OpPlan], target: TargetPlan) -> dict[str, Exposed]:
    """Returns the exposed part of the collectives of each site whose operation knows it, by their source."""
    found = ((plan, plan.op.hiding(plan, target)) for plan in plans)
    sources = ((plan.op.source(OperationName(plan.op.scope(plan) or "")), one) for plan, one in found if one)
    return {source: one for source, one in sources if source is not None}


def loop_trips(plans: Iterable[OpPlan]) -> int:
    """Returns how many times the loops that operations add to the step run, together."""
    return math.prod(plan.chosen.num_trips for plan in plans)


def runs_beside_compute(ops: Iterable[ParallelOp], names: Iterable[tuple[str, str]]) -> bool:
    """Returns True if the collectives of some strategy run beside its own arithmetic. names: kinds and strategies."""
    passes = {op.kind: op.beside_compute for op in ops}
    return any(name in passes.get(kind, ()) for kind, name in names)


def find_source(ops: Iterable[ParallelOp], name: OperationName) -> str | None:
    """Returns what a collective moves, by its name, if it belongs to one of these operations."""
    return next((source for op in ops if (source := op.source(name)) is not None), None)
