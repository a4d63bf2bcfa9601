"""Checks a declaration: compares the runs of its small program with those of one device, a line for each property."""

import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import combinations
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
    GRADIENTS_TO_UPDATE,
    ROUNDINGS_TO_NARROW,
    Deviation,
    deviation,
    deviations,
    nudged,
    tolerances,
    worst,
)
from meshloom.compiler.check.reference import StepOutput, forward, plain_context
from meshloom.compiler.check.same_program import SameProgram
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.format import counted
from meshloom.compiler.core.places import PUBLISHED, is_published
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.parallel.encodings import float32_params
from meshloom.compiler.spec.target_spec import CpuTarget
from meshloom.compiler.step.train_step import GRADIENTS, NUM_PADDING, NUM_TARGETS
from meshloom.models import PADDING_TARGET, Model

from ..processes.devices import start_devices
from ..processes.distributed import Processes
from .check_data import pieces_of, wrong_last_targets, wrong_targets
from .check_files import MOST_PARAMETERS, CheckFiles, DeclaredFolder, transformers_logits
from .programs import Compiler, SmallProgram, on_host
from .runs import NUM_STEPS, CheckRuns, largest, least

FEW_BITS_RUNS = 4  # of matmuls in few bits, each with parameters of its own


class DeclarationCheck(CheckRuns):
    """One check: the runs, and a line for each property of them."""

    def report(self, show: Callable[[str], None] = lambda _: None) -> CheckReport:
        """Runs the check. show: is called with what it does now."""
        start, lines = time.perf_counter(), list[CheckLine]()
        show("lowering programs")
        start_devices(CpuTarget(kind="cpu", num_devices=self.shrunk.plan.target.num_devices), Processes())
        with Compiler() as compiler:
            self.start(compiler)
            self.compile_all()
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

    def lines(self) -> Iterator[CheckLine]:
        """Yields the lines of the table, in its order."""
        yield self._same_program()
        yield self.targets()
        yield from self.of_step()
        yield self._precision()
        yield self.matmuls()
        yield from self._over_meshes()
        yield self.packed()
        yield self._padding()
        yield from self.in_files()
        yield self.weights()

    def of_step(self) -> Iterator[CheckLine]:
        """Yields the lines that compare the step of the mesh with that of one device."""
        yield self._loss()
        yield self._gradients()
        yield self._updated()
        yield self._tied()
        yield self._auxiliary()
        yield self._token_counts()

    def _loss(self) -> CheckLine:
        measured = max(deviation(m["loss"], e.loss) for (_, m), e in zip(self.steps, self.expected.found, strict=True))
        what = "the loss of the mesh is that of one device"
        return deviation_line("loss", what, Deviation("", measured, self.of_loss), why=f"{NUM_STEPS} steps")

    def _gradients(self) -> CheckLine:
        each = zip(self.steps, self.expected.found, strict=True)
        found = largest(deviations(m[GRADIENTS], e.gradients) for (_, m), e in each)
        return self._of_parameters("gradients", "each gradient is that of one device", found, self.of_gradients)

    def _updated(self) -> CheckLine:
        def moves(params: Any, before: Any) -> dict[str, np.ndarray]:
            after, start = leaves_by_path(params), leaves_by_path(before)
            return {path: np.asarray(after[path], np.float64) - start[path] for path in after}

        ran, ours = self.expected, self.decoded(self.steps[-1][0]["params"])
        expected = moves(ran.params[-1], ran.params[0])
        found = deviations(moves(ours, self.decoded(self.train.on.params(self.params))), expected)
        rounding = deviations(moves(self.rounded.params[-1], self.rounded.params[0]), expected)
        tolerated = {
            path: value + GRADIENTS_TO_UPDATE * self.of_gradients.get(path, 0.0)
            for path, value in tolerances(rounding).items()
        }
        return self._of_parameters("update", "weights move as on one device", found, tolerated)

    def _of_parameters(
        self, name: str, what: str, found: dict[str, float], tolerated: dict[str, float], *, why: str = ""
    ) -> CheckLine:
        one = worst(found, tolerated)
        wrong = [path for path, value in found.items() if value > tolerated.get(path, 0.0)]
        said = why or f"{counted(len(found), 'parameter')}"
        said = f"{len(wrong)} of {counted(len(found), 'parameter')} differ" if wrong else said
        return deviation_line(name, what, one, split=self.split.get(one.path), why=said)

    def _precision(self) -> CheckLine:
        name, compute = "precision", self.shrunk.plan.spec.precision.compute
        what = f"{compute} stays near float32"
        if self.narrow is None:
            return not_run(name, "the declared types stay near float32", "the declaration computes in float32")
        expected, step = _figures(self.expected.found[0]), self.step.result()
        each = [on_host(step(nudged(self.params, compute, seed), self.batches[0])) for seed in (1, 2)]
        rounding = largest(deviations(_figures(one), expected) for one in each)
        found = deviations(self._figures_of(self.narrow, self.params), expected)
        return self._of_parameters(name, what, found, tolerances(rounding, ROUNDINGS_TO_NARROW))

    def matmuls(self) -> CheckLine:
        """Returns the line of matmuls in few bits. Sums in another order now and then move a number over the middle
        between two elements, and then all that follows is rounded otherwise. With other parameters it is other numbers,
        but a fault is a fault with all: so the smallest difference of several runs counts."""
        name, what = "matmuls", "matmuls in few bits round as on one device"
        if isinstance(self.in_few_bits, str):
            return not_run(name, what, self.in_few_bits)
        drawn = [nudged(self.params, "float32", seed) for seed in range(FEW_BITS_RUNS)]
        mesh, one = ([self._figures_of(program, params) for params in drawn] for program in self.in_few_bits)
        rounding = least(deviations(a, b) for a, b in combinations(one, 2))
        found = least(map(deviations, mesh, one))
        used = (each.precision for each in self.in_few_bits[0].on.plan.operations)
        how = sorted({each.how for each in used if each and (each.arithmetic or each.gather)})
        sent = self.spec.precision
        how += [f"tokens sent to experts in {sent.dispatch}"] if sent.dispatch else []
        how += [f"gradients of their results in {sent.dispatch_gradients}"] if sent.dispatch_gradients else []
        return self._of_parameters(name, what, found, tolerances(rounding), why="; ".join(how))

    def _figures_of(self, program: SmallProgram, params: Any) -> dict[str, Any]:
        """Returns the loss of the first batch and its gradients, by path."""
        on = program.on
        stored = jax.tree.map(lambda weight, x: on_host(weight.encoding.store_of(x)), on.plan.weights, params)
        (loss, count), gradients, *_ = program.run(on.params(stored), on.placed(self.batches[0]))
        return {"loss": loss / max(count, 1), **leaves_by_path(jax.tree.map(np.float32, gradients))}

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

    def targets(self) -> CheckLine:
        name, what = "data", "each target is the next token of its document"
        if self.spec.data.gives_sequences:
            return not_run(name, what, "a class of yours returns whole sequences")
        last = len(self.batches) - 1
        wrong = list[str]()
        for number, batch in enumerate(self.batches):
            is_masked = number == last
            wrong += wrong_targets(batch, is_masked=is_masked, is_isolated=self.spec.data.isolate_documents)
            wrong += wrong_last_targets(batch, self.data.tokens(number), is_masked=is_masked)
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
        measured = deviation(base, self.step.result()(self.params, batch).loss)
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
        found = largest(deviations(m[GRADIENTS], e.gradients) for (_, m), e in each)
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
            placed = self.train.on.params(params)
            out, params = files.exported(float32_params(self.plan.weights, placed)), self.decoded(params)
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
        yield self._by_transformers(logits, theirs, out, self.plan.model, params)

    def weights(self) -> CheckLine:
        """Returns the line of the folder of published weights that the declaration names, if it names one."""
        name, what = "weights", "transformers computes the same logits from the declared folder"
        place, number = self.declared.spec.checkpoint.weights, self.declared.num_parameters
        if place is None or not is_published(place):
            return not_run(name, what, "no folder of published weights is declared")
        if number > MOST_PARAMETERS:
            return not_run(name, what, f"{number:,} parameters are more than the {MOST_PARAMETERS:,} that it compares")
        folder = DeclaredFolder(Path(place.removeprefix(PUBLISHED)), self.as_published())
        return self._by_transformers(name, what, folder.path, folder.plan.model, folder.params())

    def _by_transformers(self, name: str, what: str, folder: Path, model: Model, params: Any) -> CheckLine:
        """Returns the line that compares the logits of parameters with those of a folder by transformers."""
        missing = [each for each in ("torch", "transformers") if find_spec(each) is None]
        if missing:
            return not_run(name, what, f"{' and '.join(missing)} is not installed")
        tokens = self.batches[0]["inputs"][:2]

        def of_ours(params: Any, inputs: Any) -> Any:
            return forward(model, params, _head_of(model, params), inputs, plain_context(inputs))[0]

        program = self.compiler.plain(of_ours, params, tokens)
        try:
            found = transformers_logits(folder, tokens)
        except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            return not_run(name, what, f"transformers does not read it: {str(error).splitlines()[0]}")
        ours, rounded = program.result()(params, tokens), program.result()(nudged(params, "float32", 1), tokens)
        tolerated = tolerances({"": deviation(rounded, ours)})[""]
        return deviation_line(name, what, Deviation("", deviation(ours, found), tolerated))

    def _same_program(self) -> CheckLine:
        other = list(SameProgram(self.declared, self.shrunk.plan).differences())
        what = "strategies and kinds of collectives are the declared ones"
        return judged_line("program", what, other, by="the plans", otherwise="differs")


def _figures(output: StepOutput) -> dict[str, Any]:
    """Returns the loss and the gradients of a step on one device, by path."""
    return {"loss": output.loss, **leaves_by_path(output.gradients)}


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
