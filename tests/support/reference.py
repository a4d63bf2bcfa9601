"""A reference step on one device, in JAX and NumPy without any of our step."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.optim.configs import AdamWConfig, CosineSchedule
from meshloom.models import Context, Model, split_aux


def forward(model: Model, params: Any, inputs: Array, segment_ids: Array | None = None) -> Array:
    """Logits on one device: layers unrolled, no scan, no remat, no sharding."""
    context = Context(jnp.arange(inputs.shape[1])[None], lambda name, x, *axes, **_: x, segment_ids_BT=segment_ids)
    x = model.embed.apply(params["embed"], inputs, context)
    for stack in model.stacks:
        for i in range(stack.num_layers):
            x, _ = split_aux(stack.layer.apply(jax.tree.map(lambda w, i=i: w[i], params[stack.name]), x, context))
    return model.head.apply(model.head_params(params["head"], params["embed"]), x, context)


def reference_loss(model: Model, params: Any, inputs: Array, targets: Array) -> Array:
    """Mean cross-entropy on one device, by optax's own loss."""
    logits = forward(model, params, inputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def reference_adamw(run: RunSpec, params: Any, gradients: Any, moments: Any, step: int) -> Any:
    """One step of clipped AdamW in NumPy, from the paper's formulas. `step` counts from 0. Updates in place."""
    spec, schedule, num_steps = run.optimizer, run.schedule, run.num_steps
    assert isinstance(spec, AdamWConfig)
    assert isinstance(schedule, CosineSchedule)
    assert spec.max_grad_norm is not None
    norm = math.sqrt(sum(float((np.asarray(g, np.float64) ** 2).sum()) for g in jax.tree.leaves(gradients)))
    warmup = schedule.num_warmup_steps
    if step < warmup:
        rate = spec.learning_rate * (step + 1) / warmup
    else:
        progress = (step - warmup) / (num_steps - 1 - warmup)
        low = spec.learning_rate * schedule.final_learning_rate_fraction
        rate = low + (spec.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * progress))
    flat, tree = jax.tree_util.tree_flatten_with_path(params)
    updated = []
    for (path, p), g, m, v in zip(flat, jax.tree.leaves(gradients), *map(jax.tree.leaves, moments), strict=True):
        g = np.asarray(g, np.float64) * (min(1.0, spec.max_grad_norm / norm) if norm else 1.0)
        m[...] = spec.b1 * m + (1 - spec.b1) * g
        v[...] = spec.b2 * v + (1 - spec.b2) * g**2
        direction = m / (1 - spec.b1 ** (step + 1)) / (np.sqrt(v / (1 - spec.b2 ** (step + 1))) + spec.epsilon)
        decay = 0.0 if "scale_E" in str(path) else spec.weight_decay
        updated.append(np.asarray(p, np.float64) - rate * (direction + decay * np.asarray(p, np.float64)))
    return jax.tree.unflatten(tree, updated), norm, rate


def reference_steps(run: RunSpec, params: Any, tokens: Any, loss_and_gradients: Any) -> Any:
    """Steps on one device without any of our step: ((loss, gradients) of the first batch, (loss, norm, rate) of each).
    loss_and_gradients: of (parameters, a batch of tokens)."""
    moments = [jax.tree.map(lambda x: np.zeros(x.shape, np.float64), params) for _ in range(2)]
    first, curve = None, []
    for step, batch in enumerate(tokens):
        loss, grads = loss_and_gradients(jax.tree.map(np.float32, params), batch)
        first = first or (float(loss), jax.tree.map(np.asarray, grads))
        params, norm, rate = reference_adamw(run, params, grads, moments, step)
        curve.append((float(loss), norm, rate))
    return first, np.array(curve)
