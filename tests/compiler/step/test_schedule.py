"""A layer schedule from outside, which owns both loops in another order: what a pipeline needs is handed to it."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import plan_of, pointwise_plan
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.step import train_step
from meshloom.compiler.step.schedule import HeadOutput, Sums, split_microbatches
from meshloom.models import Aux
from support.programs import Gradients, batch_of


@dataclass(frozen=True)
class BreadthFirst:
    """Runs each layer on all microbatches before the next layer begins, forward and then backward. Embedding, layers
    and head are differentiated one by one, as the stages of a pipeline are."""

    num_microbatches: int

    def run(self, model: Any, weights: Any, batch: Any, *, gradient_scale: Any) -> Any:
        accumulators = weights.gradient_accumulators(is_last=False)
        parts = split_microbatches(batch, self.num_microbatches)
        each = [jax.tree.map(lambda x, i=i: x[i], parts) for i in range(self.num_microbatches)]
        microbatches = [model.prepare(part, {}) for part in each]

        def piece(name, own):
            return weights.bound(accumulators | {name: own}, None, is_last=False).piece(name)

        def layer_of(stack, index, microbatch):
            def run(own, x):
                whole = piece(stack.name, accumulators[stack.name])
                working = jax.tree.map(lambda w: w[index], whole.working)
                one = replace(whole, accumulators=own, working=working)
                return stack.layer(one.gathered(), microbatch.layers, jnp.array(index), x)

            return run

        of_embed = accumulators["embed"]
        made = [jax.vjp(lambda own, m=m: model.embed(piece("embed", own), m), of_embed) for m in microbatches]
        xs, tied, back = (
            [x for (x, _), _ in made],
            [t for (_, t), _ in made],
            [("embed", 0, [pull for _, pull in made])],
        )
        auxiliary = {stack.name: [] for stack in model.stacks}
        for stack in model.stacks:
            for index in range(stack.num_layers):
                own = jax.tree.map(lambda s, index=index: s[index], accumulators[stack.name])
                made = [jax.vjp(layer_of(stack, index, m), own, x) for m, x in zip(microbatches, xs, strict=True)]
                xs = [x for (x, _), _ in made]
                back.append((stack.name, index, [pull for _, pull in made]))
                auxiliary[stack.name].append([aux for (_, aux), _ in made])
        made = [
            jax.vjp(lambda own, t, x, m=m: model.head(piece("head", own), t, x, m), accumulators["head"], t, x)
            for m, t, x in zip(microbatches, tied, xs, strict=True)
        ]
        outputs = [output for output, _ in made]
        layers = {
            name: jax.tree.map(lambda *each: jnp.stack(each), *map(_added, each)) for name, each in auxiliary.items()
        }
        sums = Sums(_added([o.loss for o in outputs]), layers | {"head": _added([o.aux for o in outputs])})
        if gradient_scale is None:
            return sums, None

        def cotangent(aux):
            losses = jax.tree.map(lambda _: gradient_scale, aux.losses)
            return Aux(losses, jax.tree.map(jnp.zeros_like, aux.statistics))

        gradients = {name: [] for name in auxiliary}
        pulled = [pull(HeadOutput(gradient_scale, jnp.zeros(()), cotangent(output.aux))) for output, pull in made]
        heads, of_tied, dxs = zip(*pulled, strict=True)
        for name, index, pulls in reversed(back[1:]):
            auxes = auxiliary[name][index]
            pulled = [pull((dx, cotangent(aux))) for pull, dx, aux in zip(pulls, dxs, auxes, strict=True)]
            gradients[name].insert(0, _added([own for own, _ in pulled]))
            dxs = [dx for _, dx in pulled]
        embeds = [pull((dx, t))[0] for pull, dx, t in zip(back[0][2], dxs, of_tied, strict=True)]
        stacked = {name: jax.tree.map(lambda *g: jnp.stack(g), *each) for name, each in gradients.items()}
        return sums, weights.reduce({"embed": _added(embeds), **stacked, "head": _added(heads)})


def _added(trees: Any) -> Any:
    return jax.tree.map(lambda *each: sum(each), *trees)


HSDP = ("target=cpu-4", "sharding=hsdp", "mesh.replica=2", "mesh.fsdp=2", "num_microbatches=2")


@pytest.mark.parametrize("model", ["pointwise", pytest.param("decoder, tied", marks=pytest.mark.ci)])
def test_a_schedule_in_another_order_makes_the_same_gradients(model, tokens, proof, monkeypatch):
    plan = pointwise_plan(*HSDP) if model == "pointwise" else plan_of(*HSDP, "model.embeddings=tied")
    own = Gradients(plan, batch_of(tokens[0]))
    monkeypatch.setattr(train_step, "choose_schedule", lambda plan: BreadthFirst(plan.spec.num_microbatches))
    other = Gradients(plan, batch_of(tokens[0]))
    if proof.is_known(own.parts, other.parts):
        return
    params = jax.tree.map(np.asarray, plan.model.init(jax.random.key(0)))
    (expected_loss, expected), (loss, ours) = own(params), other(params)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for path, gradient in leaves_by_path(ours).items():
        reference = leaves_by_path(expected)[path]
        np.testing.assert_allclose(gradient, reference, rtol=1e-5, atol=1e-6 * np.abs(reference).max(), err_msg=path)
