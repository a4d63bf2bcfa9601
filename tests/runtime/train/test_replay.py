"""Steps that run again: which results are kept, and what is said of the data and of the hardware."""

from dataclasses import dataclass, field
from math import nan
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from conftest import LINEAR_STACK, plan_of
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.step.train_step import LOSS_BY_SHARD
from meshloom.runtime.compile.run_programs import mesh_of
from meshloom.runtime.core.failures import FAULTY, RunFailed
from meshloom.runtime.train.replay import FEWEST_LOSSES, Replay, odd_replicas, suspect_of
from support.programs import on_devices, programs_of

DECLARED = (*LINEAR_STACK, "sharding=hsdp", "mesh.replica=2", "mesh.fsdp=4", "on_nonfinite=replay",
            "replay.check_every_num_steps=3")  # fmt: skip


@dataclass
class Faulty:
    """The real programs, whose train step is wrong in those of its runs that have a fault: a function of the state and
    the metrics that it returns."""

    programs: Any
    faults: dict[int, Any]
    num_runs: int = field(default=0)

    def train(self, state: Any, batch: Any) -> tuple[Any, Any]:
        made = self.programs["train"](state, batch)
        fault = self.faults.get(self.num_runs)
        self.num_runs += 1
        return fault(*made) if fault else made


def taking_steps(faults: dict[int, Any], tokens: np.ndarray, *, overrides: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Returns what takes a step, the programs, what is said, the first state and a batch."""
    plan = plan_of(*DECLARED, *overrides)
    of_programs = (text for text in overrides if text.startswith(("optimizer", "precision")))  # others change none
    programs, said = programs_of(plan_of(*DECLARED, *of_programs)), list[Any]()
    faulty = Faulty(programs, faults)
    run: Any = SimpleNamespace(
        plan=plan, spec=plan.spec, warn=said.append,
        processes=SimpleNamespace(hosts=("here",), gather=lambda _, text: [text]),
        documents=lambda position, rows: f"rows {list(rows)} of {position}",
    )  # fmt: skip
    take_step = Replay(run).around_step(lambda state, batch, *_: faulty.train(state, batch))
    return take_step, faulty, said, programs["init"](), on_devices(programs, tokens[0])


def same_bits(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def nan_in_shard(shard: int) -> Any:
    def fault(state: Any, metrics: Any) -> tuple[Any, Any]:
        shards = np.array(metrics[LOSS_BY_SHARD])
        shards[shard] = nan
        return state, metrics | {"loss": np.float32(nan), LOSS_BY_SHARD: shards}

    return fault


def loss_times(factor: float) -> Any:
    return lambda state, metrics: (state, metrics | {"loss": metrics["loss"] * factor})


def on_one_device(name: str, device: int) -> Any:
    """Another bit on one device alone of an array that is whole on all."""

    def fault(state: Any, metrics: Any) -> tuple[Any, Any]:
        array = state[name]
        parts = [np.array(part.data) for part in array.addressable_shards]
        parts[device] = parts[device] + 1
        held = [jax.device_put(x, s.device) for x, s in zip(parts, array.addressable_shards, strict=True)]
        return state | {name: jax.make_array_from_single_device_arrays(array.shape, array.sharding, held)}, metrics

    return fault


def test_a_step_without_a_fault_is_the_programs_own(tokens):
    take_step, programs, said, state, batch = taking_steps({}, tokens)
    mine, metrics = take_step(state, batch, 1, {})
    expected, expected_metrics = programs.programs["train"](state, batch)
    assert same_bits((mine, metrics), (expected, expected_metrics))
    assert programs.num_runs == 1
    assert said == []
    np.testing.assert_allclose(np.sum(metrics[LOSS_BY_SHARD]) / metrics["num_targets"], metrics["loss"], rtol=1e-6)


def test_a_check_finds_nothing_in_a_state_whose_fields_are_not_in_alphabetical_order(tokens):
    """Adafactor's v_row, v_col and v have other shardings."""
    overrides = ("optimizer=adafactor", "replay.check_every_num_steps=1")
    take_step, _, said, state, batch = taking_steps({}, tokens, overrides=overrides)
    take_step(state, batch, 1, {})
    assert said == []


def test_a_result_that_comes_once_is_the_hardware_and_the_device_is_named(tokens):
    take_step, programs, said, state, batch = taking_steps({0: nan_in_shard(5)}, tokens)
    mine, metrics = take_step(state, batch, 1, {})
    assert same_bits((mine, metrics), programs.programs["train"](state, batch))
    (problem,) = said
    device = mesh_of(plan_of(*DECLARED)).devices.flat[5]
    assert problem.where == "step 1"
    assert f"and one of them twice: {device} on here; the hardware, or a sum in another order" in problem.what


def test_the_same_again_is_the_data_or_the_model_and_its_rows_are_named(tokens):
    take_step, _, said, state, batch = taking_steps({0: nan_in_shard(3), 1: nan_in_shard(3)}, tokens)
    _, metrics = take_step(state, batch, 1, {"next_batch": 7})
    assert np.isnan(metrics["loss"])
    (problem,) = said
    assert "the data or the model" in problem.what
    assert problem.fix == "look at rows [6, 7] of {'next_batch': 7}"  # 16 rows over 8 shards


@pytest.mark.ci
def test_the_matmul_whose_scale_overflowed_is_named(tokens):
    """A weight of the first layer is so large that its product is infinite."""
    few = ("precision.matmuls=[{match:null,forward:fp8,gradients:fp8_e5m2}]", "precision.emulate=true")
    take_step, programs, said, state, batch = taking_steps({}, tokens, overrides=few)
    kernel = state["params"]["layers"]["kernel_EM"]
    with jax.set_mesh(mesh_of(plan_of(*DECLARED))):
        state["params"]["layers"]["kernel_EM"] = jax.device_put(kernel.at[0].set(3e38), kernel.sharding)
    take_step(state, batch, 1, {})
    assert programs.num_runs == 2
    (problem,) = said
    assert "; scales overflowed: input of layers/residual (" in problem.what


def test_a_spike_that_comes_twice_is_kept(tokens):
    spike = FEWEST_LOSSES + 2  # after as many runs, and two that were checked
    take_step, programs, said, state, batch = taking_steps({spike: loss_times(9), spike + 1: loss_times(9)}, tokens)
    for step in range(1, FEWEST_LOSSES + 1):
        take_step(state, batch, step, {})
    assert (programs.num_runs, said) == (spike, [])
    take_step(state, batch, FEWEST_LOSSES + 2, {})
    assert "9 times what it was; run again from the same state, it is the same" in said[0].what


def test_a_check_runs_a_step_twice_and_finds_what_no_loss_shows(tokens):
    take_step, programs, said, state, batch = taking_steps({0: on_one_device("step", 2)}, tokens)
    mine, _ = take_step(state, batch, 3, {})
    assert programs.num_runs == 3
    assert int(mine["step"]) == 1
    device = mesh_of(plan_of(*DECLARED)).devices.flat[2]
    assert f"two results of the same loss, and one of them twice: {device} on here; the hardware" in said[0].what


@pytest.mark.parametrize(
    ("platform", "options", "words"),
    [
        ("tpu", {}, "the hardware"),
        ("cpu", {}, "the hardware, or a sum in another order, which CPUs with several threads may take"),
        ("gpu", {}, "the hardware, or a sum in another order, which GPUs may take without "
                             "compiler_options.xla_gpu_deterministic_ops=true"),
        ("gpu", {"xla_gpu_deterministic_ops": True}, "the hardware"),
    ],
)  # fmt: skip
def test_only_where_sums_have_one_order_it_is_the_hardware_alone(platform, options, words):
    assert suspect_of(platform, options) == words


def test_three_results_end_the_run(tokens):
    take_step, _, _, state, batch = taking_steps({0: nan_in_shard(1), 1: loss_times(2)}, tokens)
    with pytest.raises(RunFailed, match="a third result") as raised:
        take_step(state, batch, 1, {})
    assert raised.value.exit_code == FAULTY


def test_replicas_that_differ_end_the_run(tokens):
    wrong = on_one_device("step", 6)
    take_step, _, _, state, batch = taking_steps({}, tokens)
    bad, _ = wrong(state, {})
    device = mesh_of(plan_of(*DECLARED)).devices.flat[6]
    with pytest.raises(RunFailed, match=rf"the replicas of step differ: {device} on here; the hardware") as raised:
        take_step(bad, batch, 3, {})
    assert raised.value.exit_code == FAULTY


@pytest.mark.parametrize(
    ("sums", "along", "odd"),
    [
        ([[1, 1, 1], [2, 2, 2]], (1,), [[0, 0, 0], [0, 0, 0]]),
        ([[1, 1, 9], [2, 2, 2]], (1,), [[0, 0, 1], [0, 0, 0]]),
        ([[1, 1, 1], [1, 9, 1]], (0, 1), [[0, 0, 0], [0, 1, 0]]),
        ([[1, 2, 3], [1, 9, 3]], (0,), [[0, 1, 0], [0, 1, 0]]),  # of two, neither is more
        ([[1, 2, 3], [4, 5, 6]], (), [[0, 0, 0], [0, 0, 0]]),
    ],
)
def test_the_odd_one_of_replicas(sums, along, odd):
    assert odd_replicas(np.array(sums, np.uint32), along).astype(int).tolist() == odd


def test_a_state_that_is_kept_is_not_donated_and_the_estimate_says_so():
    """The state before the step and the one after it are there at the same time."""
    kept, plain = plan_of(*DECLARED), plan_of(*LINEAR_STACK, "sharding=hsdp", "mesh.replica=2", "mesh.fsdp=4")
    aliased = [programs_of(plan)["train"].memory_analysis().alias_size_in_bytes for plan in (kept, plain)]
    assert aliased[0] == 0
    assert aliased[1] >= plain.memory.state_bytes
    few = ("sequence_length=1", "global_batch_size=8", "model.num_layers=12", "sharding=fsdp", "model.embed_dim=128")
    peak, known = estimate_step(wide := plan_of(*LINEAR_STACK, *few, "on_nonfinite=replay")).memory, wide.memory
    assert peak.peak_bytes >= 2 * known.state_bytes
    assert estimate_step(plan_of(*LINEAR_STACK, *few)).memory.peak_bytes < 2 * known.state_bytes
