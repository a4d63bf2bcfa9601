"""Checks a declaration: runs its small program on simulated devices and on one device, and compares what they find.

The main comparison is in float32, in which a fault is not hidden by rounding: loss, gradients and update of two steps.
Further programs have one thing otherwise, such as no context shards, so that a line names what is at fault.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from meshloom.compiler.check.check_report import (
    BY_BITS,
    CheckLine,
    CheckReport,
    deviation_line,
    judged_line,
    not_run,
)
from meshloom.compiler.check.compare import (
    ROUNDINGS_TO_NARROW,
    Deviation,
    deviation,
    deviations,
    nudged,
    tolerances,
    worst,
)
from meshloom.compiler.check.reference import StepOutput, build_plain_update, build_reference, forward, plain_context
from meshloom.compiler.check.same_program import SameProgram, split_of
from meshloom.compiler.check.shrink import Shrinking, in_float32, on_mesh, on_one_device
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.format import counted
from meshloom.compiler.core.trees import leaves_by_path, like, pick
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.plan import Plan
from meshloom.compiler.spec.target_spec import CpuTarget
from meshloom.compiler.step.train_step import GRADIENTS, NUM_PADDING, NUM_TARGETS
from meshloom.models import PADDING_TARGET

from ..processes.devices import start_devices
from ..processes.distributed import Processes
from .check_data import CheckData, pieces_of, wrong_targets
from .check_files import CheckFiles, transformers_logits
from .programs import Compiler, SmallPlan, SmallProgram, on_host

_NUM_STEPS = 2
SPREAD = 0.05  # of what is added to each parameter, so that none is 0 or 1 everywhere


@dataclass(frozen=True)
class TwoSteps:
    """Two steps. found: of each step. params: before the first, and after each."""

    found: tuple[StepOutput, ...]
    params: tuple[Any, ...]


@dataclass
class DeclarationCheck:
    """One check. declared: the declaration's plan, for its target. program: its name."""

    declared: Plan[RunSpec]
    program: str

    def __post_init__(self) -> None:
        """Shrinks the declaration. Raises ConfigError where it cannot shrink."""
        self.shrunk = Shrinking(self.declared).shrunk()

    def report(self, show: Callable[[str], None] = lambda _: None) -> CheckReport:
        """Runs the check. show: is called with what it does now."""
        start, lines = time.perf_counter(), list[CheckLine]()
        show("lowering programs")
        start_devices(CpuTarget(kind="cpu", num_devices=self.shrunk.plan.target.num_devices), Processes())
        with Compiler() as self.compiler:
            self.start()
            show("compiling programs, and running them")
            for line in self.lines():
                lines.append(line)
                show(f"{counted(len(lines), 'line')} of the table, the last is {line.name}")
        return CheckReport(
            program=self.program,
            small=self.small,
            passed=all(line.status != "failed" for line in lines),
            lines=tuple(lines),
            cuts=self.shrunk.cuts,
            replaced=self.shrunk.replaced,
            seconds=time.perf_counter() - start,
        )

    @property
    def small(self) -> str:
        """Returns the small program in words: "3 layers, fsdp 2 x tensor 2, 4 x 32 tokens"."""
        plan = self.shrunk.plan
        axes = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.sizes.items() if size > 1) or "one device"
        num_layers = getattr(plan.spec.model, "num_layers", 0) or sum(stack.num_layers for stack in plan.model.stacks)
        layers = counted(num_layers, "layer")  # a stack counts periods of windows
        return f"{layers}, {axes}, {plan.spec.global_batch_size} x {plan.spec.sequence_length} tokens"

    def start(self) -> None:
        """Plans and lowers all programs; the longest are compiled first."""
        ops = self.declared.ops
        self.spec = in_float32(self.shrunk.plan.spec)
        self.plan = plan_run(self.spec, ops)
        self.one = plan_run(_plainly(on_one_device(self.spec)), ops)
        self.batches = CheckData(self.spec, _NUM_STEPS).batches()
        self.trained = frozenset(self.plan.sharding.trained)
        self.params = self._drawn()
        self.split = {each.array.path: split_of(each.spec) for each in self.plan.sharding.parameters}
        first, compiler, on = self.batches[0], self.compiler, SmallPlan(self.plan)
        self.train = compiler.train(on, first)
        step = build_reference(self.spec, self.plan.model, self.trained)
        self._step = compiler.plain(step, self.params, first)
        self.narrow = None
        if self.shrunk.plan.spec.precision != self.spec.precision:
            self.narrow = compiler.loss(SmallPlan(self.shrunk.plan), first, with_gradients=True)
        self.evaluated = compiler.loss(on, first, with_gradients=False)
        self.variants = {name: self._variant(make) for name, make in self._variant_plans().items()}
        output = jax.eval_shape(step, self.params, first)
        state = jax.eval_shape(self.one.optimizer.init, pick(self.params, self.trained))
        update = build_plain_update(self.one.model, self.one.optimizer, self.trained)
        self._update = compiler.plain(update, self.params, state, output)

    def _drawn(self) -> Any:
        """Returns initial parameters, each moved a little, so that none is 0 or 1 everywhere."""
        drawn = jax.jit(self.plan.model.init)(jax.random.key(self.spec.seed))
        rng = np.random.default_rng(0)
        return like(
            drawn,
            {
                path: (np.asarray(x, np.float32) + SPREAD * rng.standard_normal(x.shape)).astype(np.float32)
                for path, x in leaves_by_path(drawn).items()
            },
        )

    def _initial_state(self) -> Any:
        optimizer = on_host(jax.jit(self.one.optimizer.init)(pick(self.params, self.trained)))
        return {"step": np.zeros((), np.int32), "params": self.params, "optimizer": optimizer}

    def lines(self) -> Iterator[CheckLine]:
        """Yields the lines of the table, in its order."""
        yield self._same_program()
        yield self.data()
        yield from self.of_step()
        yield self._precision()
        yield from self._over_meshes()
        yield self.packed()
        yield self._padding()
        yield from self.in_files()

    def of_step(self) -> Iterator[CheckLine]:
        """Yields the lines that compare the step of the mesh with that of one device."""
        yield self._loss()
        yield self._gradients()
        yield self._updated()
        yield self._tied()
        yield self._auxiliary()
        yield self._token_counts()

    # What ran.

    def _reference(self, params: Any) -> TwoSteps:
        step, update = self._step.result(), self._update.result()
        state = on_host(jax.jit(self.one.optimizer.init)(pick(params, self.trained)))
        found, each = list[StepOutput](), [params]
        for batch in self.batches:
            output = step(params, batch)
            params, state = on_host(update(params, state, output))
            found.append(on_host(output))
            each.append(params)
        return TwoSteps(tuple(found), tuple(each))

    @cached_property
    def expected(self) -> TwoSteps:
        return self._reference(self.params)

    @cached_property
    def rounded(self) -> TwoSteps:
        """Returns what one device finds after rounding of the parameters in float32."""
        return self._reference(nudged(self.params, "float32", seed=1))

    @cached_property
    def steps(self) -> tuple[tuple[Any, Any], ...]:
        """Returns (state, metrics) of each step on the mesh, on the host."""
        state = self.train.on.state(self._initial_state())
        made = list[tuple[Any, Any]]()
        for batch in self.batches:
            state, metrics = self.train.run(state, self.train.on.placed(batch))
            made.append((state, metrics))
            state = self.train.on.state(state)
        return tuple(made)

    # Tolerances.

    @cached_property
    def of_gradients(self) -> dict[str, float]:
        each = zip(self.rounded.found, self.expected.found, strict=True)
        return tolerances(_largest(deviations(a.gradients, b.gradients) for a, b in each))

    @cached_property
    def of_loss(self) -> float:
        each = zip(self.rounded.found, self.expected.found, strict=True)
        return tolerances({"": max(deviation(a.loss, b.loss) for a, b in each)})[""]

    # Lines.

    def _loss(self) -> CheckLine:
        measured = max(deviation(m["loss"], e.loss) for (_, m), e in zip(self.steps, self.expected.found, strict=True))
        what = "the loss of the mesh is that of one device"
        return deviation_line("loss", what, Deviation("", measured, self.of_loss), why=f"{_NUM_STEPS} steps")

    def _gradients(self) -> CheckLine:
        each = zip(self.steps, self.expected.found, strict=True)
        found = _largest(deviations(m[GRADIENTS], e.gradients) for (_, m), e in each)
        return self._of_parameters("gradients", "each gradient is that of one device", found, self.of_gradients)

    def _updated(self) -> CheckLine:
        def moves(params: Any, before: Any) -> dict[str, np.ndarray]:
            after, start = leaves_by_path(params), leaves_by_path(before)
            return {path: np.asarray(after[path], np.float64) - start[path] for path in after}

        ran, ours = self.expected, self.steps[-1][0]["params"]
        expected = moves(ran.params[-1], ran.params[0])
        found = deviations(moves(ours, ran.params[0]), expected)
        rounding = deviations(moves(self.rounded.params[-1], self.rounded.params[0]), expected)
        return self._of_parameters("update", "weights move as on one device", found, tolerances(rounding))

    def _of_parameters(
        self, name: str, what: str, found: dict[str, float], tolerated: dict[str, float], *, why: str = ""
    ) -> CheckLine:
        one = worst(found, tolerated)
        wrong = [path for path, value in found.items() if value > tolerated.get(path, 0.0)]
        said = why or f"{counted(len(found), 'parameter')}"
        said = f"{len(wrong)} of {counted(len(found), 'parameter')} differ" if wrong else said
        return deviation_line(name, what, one, split=self.split.get(one.path), why=said)

    def _precision(self) -> CheckLine:
        name, dtype = "precision", self.shrunk.plan.spec.precision.compute
        what = f"{dtype} stays near float32"
        if self.narrow is None:
            return not_run(name, "the declared types stay near float32", "the declaration computes in float32")
        plan = self.shrunk.plan
        stored = jax.tree.map(lambda x, like: np.asarray(x).astype(like.dtype), self.params, plan.abstract["params"])
        program, batch = self.narrow, self.batches[0]
        (loss, count), gradients, *_ = program.run(program.on.params(stored), program.on.placed(batch))
        expected = self.expected.found[0]
        step = self._step.result()
        each = [on_host(step(nudged(self.params, dtype, seed), batch)) for seed in (1, 2)]
        rounding = _largest(deviations(one.gradients, expected.gradients) for one in each)
        found = deviations(jax.tree.map(np.float32, gradients), expected.gradients)
        off_loss = deviation(loss / max(count, 1), expected.loss)
        roundings = ROUNDINGS_TO_NARROW
        tolerated = tolerances({**rounding, "loss": max(deviation(one.loss, expected.loss) for one in each)}, roundings)
        return self._of_parameters(name, what, {**found, "loss": off_loss}, tolerated)

    def _variant_plans(self) -> dict[str, Callable[[], RunSpec] | str]:
        """Returns what makes a declaration with one thing otherwise, or why there is none."""
        spec, sizes = self.spec, self.plan.mesh.sizes
        several = [axis for axis, size in sizes.items() if size > 1]
        flat = _plainly(on_mesh(spec, stage=1)) if sizes.get("stage", 1) > 1 else spec

        def without(axis: str) -> Callable[[], RunSpec] | str:
            if sizes.get(axis, 1) == 1:
                return f"mesh.{axis} is 1"
            return lambda: _plainly(on_mesh(spec, **{axis: 1}))

        microbatches: Callable[[], RunSpec] | str = "num_microbatches is 1"
        if spec.num_microbatches > 1:
            microbatches = lambda: flat.model_copy(update={"num_microbatches": 1})  # noqa: E731
        return {
            "meshes": (lambda: _plainly(on_one_device(spec))) if several else "the mesh is one device",
            "microbatches": microbatches,
            "context": without("context"),
            "stages": without("stage"),
        }

    def _variant(self, make: Callable[[], RunSpec] | str) -> SmallProgram | str:
        if isinstance(make, str):
            return make
        try:
            plan = plan_run(make(), self.declared.ops)
        except ConfigError as error:
            return f"the other program cannot be planned: {error.problems[0].where}: {error.problems[0].what}"
        return self.compiler.loss(SmallPlan(plan), self.batches[0], with_gradients=False)

    def _over_meshes(self) -> Iterator[CheckLine]:
        whats = {
            "meshes": "one device, by the same program",
            "microbatches": "1 microbatch",
            "context": "whole sequences on each device",
            "stages": "no pipeline",
        }
        for name, what in whats.items():
            what, program = f"the same loss with {what}", self.variants[name]
            if isinstance(program, str):
                yield not_run(name, what, program)
                continue
            each = [deviation(program.loss(self.params, b), self.evaluated.loss(self.params, b)) for b in self.batches]
            yield deviation_line(name, what, Deviation("", max(each), self.of_loss))

    def data(self) -> CheckLine:
        name, what = "data", "each target is the next token of its document"
        if self.spec.data.gives_sequences:
            return not_run(name, what, "a class of yours returns whole sequences")
        last = len(self.batches) - 1
        wrong = [
            each
            for number, batch in enumerate(self.batches)
            for each in wrong_targets(batch, is_masked=number == last, is_isolated=self.spec.data.isolate_documents)
        ]
        return judged_line(name, what, wrong, why=f"packing={self.spec.data.packing}")

    def packed(self) -> CheckLine:
        name, what = "packing", "packed documents have the losses of each alone"
        if not self.spec.data.isolate_documents:
            return not_run(name, what, "documents of a sequence see each other: data.isolate_documents=false")
        if self.spec.has_pairs:
            return not_run(name, what, "each document has a sequence for itself")
        batch, length = self.batches[0], self.spec.sequence_length
        rows, targets = list[np.ndarray](), list[np.ndarray]()
        for row, its in zip(batch["inputs"], batch["targets"], strict=True):
            for begin, end in pieces_of(row):
                pad = length - (end - begin)
                rows.append(np.pad(row[begin:end], (0, pad)))
                targets.append(np.pad(its[begin:end], (0, pad), constant_values=PADDING_TARGET))
        model = self.plan.model

        def alone(params: Any, inputs: Any, targets: Any) -> Any:
            is_token = targets != PADDING_TARGET
            context = plain_context(inputs, is_token=is_token)
            logits, *_ = forward(model, params, _head_of(model, params), inputs, context)
            log_probs = jax.nn.log_softmax(logits)
            chosen = jax.numpy.take_along_axis(log_probs, jax.numpy.maximum(targets, 0)[..., None], axis=-1)[..., 0]
            return -jax.numpy.sum(jax.numpy.where(targets >= 0, chosen, 0.0)) / jax.numpy.sum(targets >= 0)

        operands = self.params, np.stack(rows), np.stack(targets)
        expected = self.compiler.plain(alone, *operands).result()(*operands)
        measured = deviation(self.evaluated.loss(self.params, batch), expected)
        return deviation_line(
            name, what, Deviation("", measured, self.of_loss), why=f"{counted(len(rows), 'document')}"
        )

    def _padding(self) -> CheckLine:
        name, what = "padding", "no padding, and no token without a target, is in a mean"
        batch = self.batches[-1]
        base = self.evaluated.loss(self.params, batch)
        measured = deviation(base, self._step.result()(self.params, batch).loss)
        why = f"{int(np.sum(batch['targets'] < 0))} of {batch['targets'].size} places have no target"
        if self.spec.data.may_pad:
            is_padding = batch["targets"] == PADDING_TARGET
            other = {**batch, "inputs": np.where(is_padding, 1 + batch["inputs"] % 7, batch["inputs"]).astype(np.int32)}
            measured = max(measured, deviation(self.evaluated.loss(self.params, other), base))
            why += f", {int(np.sum(is_padding))} of them are padding, whose tokens change nothing"
        return deviation_line(name, what, Deviation("", measured, self.of_loss), why=why)

    def _tied(self) -> CheckLine:
        name, what = "tied", "a shared table has one value, and the gradients of both uses"
        tied = [f"embed/{original}" for original in self.plan.model.tied.values()]
        if not tied:
            return not_run(name, what, "embedding and head share nothing")
        twice = [f"head/{own}" for own in self.plan.model.tied if f"head/{own}" in self.split]
        if twice:
            return judged_line(name, what, [f"{path} is a parameter besides {tied[0]}" for path in twice])
        trained = [path for path in tied if path in self.trained]
        if not trained:
            return not_run(name, what, "the shared table is frozen")
        each = zip(self.steps, self.expected.found, strict=True)
        found = _largest(deviations(m[GRADIENTS], e.gradients) for (_, m), e in each)
        return self._of_parameters(name, what, {path: found[path] for path in trained}, self.of_gradients)

    def _auxiliary(self) -> CheckLine:
        name, what = "auxiliary", "losses and statistics of layers are counted once"
        names = [key for key in self.expected.found[0].means if key in self.steps[0][1]]
        if not names:
            return not_run(name, what, "no layer returns any")
        found, rounding = dict[str, float](), dict[str, float]()
        for (_, metrics), e, r in zip(self.steps, self.expected.found, self.rounded.found, strict=True):
            for key in names:
                found[key] = max(found.get(key, 0.0), deviation(metrics[key], e.means[key]))
                rounding[key] = max(rounding.get(key, 0.0), deviation(r.means[key], e.means[key]))
        one = worst(found, tolerances(rounding))
        return deviation_line(name, what, one, why=", ".join(names[:4]))

    def _token_counts(self) -> CheckLine:
        wrong = list[str]()
        for step, ((_, metrics), batch) in enumerate(zip(self.steps, self.batches, strict=True), 1):
            targets = batch["targets"]
            wanted = {NUM_TARGETS: int(np.sum(targets >= 0)), NUM_PADDING: int(np.sum(targets == PADDING_TARGET))}
            for key, number in wanted.items():
                if key in metrics and int(metrics[key]) != number:
                    wrong.append(f"{key} of step {step} is {int(metrics[key])} and not {number}")
        return judged_line("counts", "tokens are counted once", wrong)

    def in_files(self) -> Iterator[CheckLine]:
        """Yields the lines of what is saved after the first step, and exported."""
        with TemporaryDirectory(prefix="meshloom-check-") as folder:
            files = CheckFiles(self.train.on, Path(folder))
            state = self.steps[0][0]
            restored = files.saved_and_restored(state, step=1)
            yield _equal("checkpoint", "a checkpoint holds what was trained", on_host(restored), state)
            again, _ = self.train.run(restored, self.train.on.placed(self.batches[1]))
            what = "a run that goes on makes the same step"
            yield _equal("resume", what, again, self.steps[1][0])
            yield from self._exported(files, state["params"])

    def _exported(self, files: CheckFiles, params: Any) -> Iterator[CheckLine]:
        name, what = "export", "an exported folder holds what was trained"
        logits, theirs = "logits", "transformers computes the same logits from that folder"
        try:
            out = files.exported(self.train.on.params(params))
        except ConfigError as error:
            first = error.problems[0]
            why = f"it has no published form: {first.where}: {first.what}"
            yield not_run(name, what, why)
            yield not_run(logits, theirs, why)
            return
        if self.plan.model.adapters:
            yield not_run(name, what, "the adapter is merged with its base; the line logits compares them")
        else:
            yield _equal(name, what, files.read(out), params)
        missing = [each for each in ("torch", "transformers") if find_spec(each) is None]
        if missing:
            yield not_run(logits, theirs, f"{' and '.join(missing)} is not installed")
            return
        tokens, model = self.batches[0]["inputs"][:2], self.plan.model

        def of_ours(params: Any, inputs: Any) -> Any:
            return forward(model, params, _head_of(model, params), inputs, plain_context(inputs))[0]

        program = self.compiler.plain(of_ours, params, tokens)
        try:
            found = transformers_logits(out, tokens)
        except (ImportError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            yield not_run(logits, theirs, f"transformers does not read it: {str(error).splitlines()[0]}")
            return
        ours, rounded = program.result()(params, tokens), program.result()(nudged(params, "float32", 1), tokens)
        tolerated = tolerances({"": deviation(rounded, ours)})[""]
        yield deviation_line(logits, theirs, Deviation("", deviation(ours, found), tolerated))

    def _same_program(self) -> CheckLine:
        other = list(SameProgram(self.declared, self.shrunk.plan).differences())
        what = "strategies and kinds of collectives are the declared ones"
        return judged_line("program", what, other, by="the plans", otherwise="differs")


def _plainly(spec: Any) -> Any:
    """Returns a declaration whose operations and pipeline are chosen anew, for another mesh."""
    pipeline = spec.pipeline.model_copy(update={"layers": "even", "ticks": "auto", "head": "auto", "gather": "auto"})
    update: dict[str, Any] = {"parallel": {}}
    if spec.mesh.stage == 1:
        update["pipeline"] = pipeline
    return spec.model_copy(update=update)


def _head_of(model: Any, params: Any) -> Any:
    """Returns all parameters of the head, also those that are the embedding's."""
    return model.head_params(params.get("head", {}), params["embed"])


def _equal(name: str, what: str, found: Any, expected: Any) -> CheckLine:
    """Returns the line of two trees that have to have the same bits."""
    ours, theirs = leaves_by_path(found), leaves_by_path(expected)
    wrong = [
        path
        for path in dict.fromkeys([*ours, *theirs])
        if path not in ours or path not in theirs or not np.array_equal(ours[path], theirs[path])
    ]
    said = [f"{path} differs" for path in wrong[:4]]
    said += [f"and {len(wrong) - 4} more"] if len(wrong) > 4 else []
    return judged_line(name, what, said, by=BY_BITS, why=counted(len(theirs), "array"))


def _largest(each: Iterator[dict[str, float]]) -> dict[str, float]:
    found = dict[str, float]()
    for one in each:
        for path, value in one.items():
            found[path] = max(found.get(path, 0.0), value)
    return found
