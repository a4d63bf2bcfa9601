"""Moments of layers in the host's memory: the update that streams them is the one that has them on the device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.traffic import HOST_COPIES
from meshloom.compiler.core.trees import leaves_by_path, nested_dict
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.step.train_step import build_init, build_update
from meshloom.compiler.xla.programs import is_finite, state_on
from support.tiers import tiered

KEYS = ("model=tiny", "target=cpu-4", "sharding=fsdp", "schedule=constant", "schedule.num_warmup_steps=0")
CASES = {
    "adamw": (),
    "adamw, int8": ("optimizer.moment_dtype=int8", "model.embed_dim=128", "model.mlp_dim=256"),
    "lion": ("optimizer=lion", "optimizer.moment_dtype=bfloat16"),
    "sgd": ("optimizer=sgd", "optimizer.nesterov=true", "optimizer.max_grad_norm=null"),
    "masters": ("precision=bfloat16_params", "sharding=zero2"),
    "float16": ("precision=float16",),
    "layers alone": ("frozen_parameters=[embed/*,head/*]",),
}


class Updates:
    """The update of a plan, compiled for the first devices."""

    def __init__(self, *keys: str) -> None:
        self.plan = plan_of(*KEYS, *keys)
        self.mesh = self.plan.mesh.of_devices(jax.devices()[:4])
        state = state_on(self.mesh, self.plan.abstract, self.plan.specs, self.plan.on_host)
        self.layouts = jax.tree.map(lambda x: x.sharding, state)
        with jax.set_mesh(self.mesh):
            self.state = jax.jit(build_init(self.plan), out_shardings=self.layouts)()
            update = jax.jit(build_update(self.plan), donate_argnums=0, out_shardings=(self.layouts, None))
            lowered = update.lower(state, jnp.float32(0), self.gradients(0), {}, {})
        # Without instructions that multiply and add at once, with which results depend on what is fused.
        self.compiled = lowered.compile(compiler_options={"xla_cpu_max_isa": "SSE4_2"})

    def step(self, loss: float, gradients: Any) -> None:
        with jax.set_mesh(self.mesh):
            self.state, _ = self.compiled(self.state, jnp.float32(loss), gradients, {}, {})

    def gradients(self, seed: int) -> Any:
        chance = np.random.default_rng(seed)
        trained = self.plan.sharding.trained
        of = {path: x.shape for path, x in leaves_by_path(self.plan.model.abstract()).items() if path in trained}
        # Whole numbers of eighths: the sum of their squares is exact in any order.
        drawn = {path: chance.integers(-8, 9, shape) / 8 for path, shape in of.items()}
        return nested_dict({path: jnp.asarray(x, jnp.float32) for path, x in drawn.items()})


@pytest.mark.parametrize("case", tiered(CASES, plain=["adamw"], release=["sgd"]))
def test_it_is_the_update_on_the_device_bit_for_bit(case):
    device, host = (Updates(*CASES[case], f"optimizer.moments_on={where}") for where in ("device", "host"))
    for seed, loss in ((1, 1.0), (2, float("nan")), (3, 1.0)):
        for each in (device, host):
            each.step(loss, each.gradients(seed))
        here, there = (leaves_by_path(jax.device_get(each.state)) for each in (device, host))
        for path, x in here.items():
            np.testing.assert_array_equal(x, there[path], err_msg=f"{path}, seed {seed}")
    assert len(host.plan.on_host) > 5


@pytest.mark.ci
def test_a_skipped_update_leaves_the_host_as_it_was():
    skip = Updates("optimizer.moments_on=host", "on_nonfinite=skip")
    skip.step(1.0, skip.gradients(1))
    before = leaves_by_path(jax.device_get(skip.state))
    skip.step(float("nan"), skip.gradients(2))
    after = leaves_by_path(jax.device_get(skip.state))
    assert any(np.any(before[path]) for path in skip.plan.on_host)
    for path, x in before.items():
        np.testing.assert_array_equal(x, after[path], err_msg=path)
    assert {x.sharding.memory_kind for path, x in leaves_by_path(skip.state).items() if path in skip.plan.on_host} == {
        "pinned_host"
    }
    assert jax.jit(is_finite)(skip.state)


WIDE = ("model=tiny", "sharding=fsdp", "target=v5p-8", "model.num_layers=8", "model.embed_dim=1024",
        "model.mlp_dim=4096", "remat=full", "global_batch_size=4", "sequence_length=256",
        "precision=bfloat16")  # fmt: skip


def test_the_device_needs_less_by_what_the_host_holds_and_waits_for_its_link():
    device, host = (plan_of(*WIDE, f"optimizer.moments_on={where}") for where in ("device", "host"))
    elements = sum(
        2 * x.size for path, x in leaves_by_path(host.model.abstract()["layers"]).items() if "norm" not in path
    )
    assert host.memory.on_host == 4 * elements // host.mesh.num_devices  # Adam's two moments in float32
    assert device.memory.optimizer == host.memory.optimizer + host.memory.on_host
    here, there = (estimate_step(plan) for plan in (device, host))
    assert there.memory.host_bytes == host.memory.on_host
    assert here.memory.peak_bytes - there.memory.peak_bytes > 0.8 * host.memory.on_host
    assert here.figures.exposed_host_seconds == 0
    seconds = [host.memory.on_host / (host.target.host_bytes_per_second(kind) or 0) for kind in HOST_COPIES]
    assert 0.8 * max(seconds) < there.figures.exposed_host_seconds <= sum(seconds)


REFUSED = {
    "a GPU": (("target=h100-8",), "the compiler for h100-8 is not known to copy"),
    "stages": (("target=v5p-16", "mesh.stage=2", "mesh.fsdp=4", "num_microbatches=2"), "and stage splits them"),
    "kept state": (("target=v5p-8", "on_nonfinite=replay"), "the state before a step is kept"),
    "no layers": (("target=v5p-8", "frozen_parameters=[layers/*]"), "no matrix of a layer is trained"),
    "no moments": (("target=v5p-8", "optimizer=sgd", "optimizer.momentum=null"), "without a momentum there are no"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_loop_can_stream_is_one_error(case):
    keys, what = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        plan_of("model=tiny", "sharding=fsdp", *keys, "optimizer.moments_on=host")
    (problem,) = error.value.problems
    assert problem.where == "optimizer.moments_on"
    assert what in problem.what
