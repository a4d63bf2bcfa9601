"""What crosses the network, counted in the compiled program with the trips of its loops.

The embedding's table is gathered, as all other weights are; where its rows are exchanged tests/test_look_up.py counts.
"""

import re
from functools import cache

import jax
import pytest

from conftest import LINEAR_STACK, WHOLE_STREAM, plan_of
from helpers import (
    collective_elements_per_step,
    collectives_per_step,
    collectives_run,
    largest_outside_loops,
    programs_of,
)
from meshloom.compiler.driver import lower

NUM_LAYERS, PER_LAYER, OUTSIDE = 3, 9, 3  # parameters of a small decoder: in a layer, in embed and head


IN_BACKWARD = "overlap.layers.reduce_in_backward=true"
GATHER = "sharding.look_up=gather"


@cache
def _text(*overrides: str) -> str:
    plan = plan_of(GATHER, *overrides)
    return lower(plan, plan.mesh.of_devices(jax.devices())).train.compile().as_text()


def _count(*overrides: str):
    return +collectives_per_step(_text(*overrides))


@pytest.fixture(scope="module")
def fsdp():
    return _count("sharding=fsdp")


def test_ddp_is_one_all_reduce_per_parameter_and_nothing_else():
    counts = _count("sharding=ddp")
    assert counts == {"all-reduce": PER_LAYER + OUTSIDE}  # a stack's gradients are reduced as one array


def test_ddp_reduces_once_per_step_whatever_the_microbatches():
    batch = "global_batch_size=32"
    assert _count("sharding=ddp", "num_microbatches=4", batch) == _count("sharding=ddp", batch)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_ddp_reduces_in_the_last_backward_pass_what_it_reduced_behind_it(num_microbatches):
    inside = _text("sharding=ddp", IN_BACKWARD, f"num_microbatches={num_microbatches}")
    assert +collectives_per_step(inside) == {"all-reduce": NUM_LAYERS * PER_LAYER + OUTSIDE}
    assert collective_elements_per_step(inside) == collective_elements_per_step(_text("sharding=ddp"))
    assert largest_outside_loops(inside, "all-reduce") == 257 * 32 + 7 * 32  # embed and head; the vocabulary padded


def test_prefetch_reduces_one_layer_more_in_backward():
    assert _count("sharding=ddp", "overlap=prefetch", IN_BACKWARD) == {
        "all-reduce": (NUM_LAYERS + 1) * PER_LAYER + OUTSIDE
    }
    counts = _count("sharding=hsdp", "overlap=prefetch", IN_BACKWARD)
    assert counts == _count("sharding=fsdp", "overlap=prefetch") | {"all-reduce": counts["reduce-scatter"]}


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_hsdp_sums_shards_over_replicas_in_the_last_backward_pass(num_microbatches):
    inside = _text("sharding=hsdp", IN_BACKWARD, f"num_microbatches={num_microbatches}")
    assert collectives_per_step(inside)["all-reduce"] == NUM_LAYERS * PER_LAYER + OUTSIDE
    assert collectives_per_step(inside)["reduce-scatter"] == num_microbatches * (NUM_LAYERS * PER_LAYER + OUTSIDE)
    elements = collective_elements_per_step(inside)["all-reduce"]
    assert elements == collective_elements_per_step(_text("sharding=hsdp"))["all-reduce"]


def test_zero1_in_backward_is_zero2_where_there_is_one_microbatch():
    assert _count("sharding=zero1", IN_BACKWARD) == _count("sharding=zero2")
    accumulated = _count("sharding=zero1", IN_BACKWARD, "num_microbatches=2")
    assert accumulated == {"reduce-scatter": NUM_LAYERS * PER_LAYER + OUTSIDE, "all-gather": PER_LAYER + OUTSIDE}


def test_fsdp_leaves_nothing_to_reduce_in_backward():
    plans = [plan_of(GATHER, "sharding=fsdp", "num_microbatches=2", *chosen) for chosen in ((), (IN_BACKWARD,))]
    texts = [lower(plan, plan.mesh.of_devices(jax.devices()), ["train"]).train.as_text() for plan in plans]
    assert texts[0] == texts[1]


def test_fsdp_gathers_twice_and_reduce_scatters_once(fsdp):
    # Forward and backward gather a layer; what embed and head gathered for the forward pass serves the backward too.
    assert fsdp == {
        "all-gather": 2 * NUM_LAYERS * PER_LAYER + OUTSIDE,
        "reduce-scatter": NUM_LAYERS * PER_LAYER + OUTSIDE,
    }


@pytest.mark.parametrize("distance", [1, 2])
def test_prefetch_gathers_so_many_layers_more_and_reduces_one_more(fsdp, distance):
    prefetch = ("sharding=fsdp", "overlap=prefetch", f"overlap.layers.prefetch={distance}")
    more = distance * PER_LAYER
    # Forward: the first layers before the loop, and in it the last ones again, with which the backward pass begins.
    assert _count(*prefetch) == fsdp | {
        "all-gather": fsdp["all-gather"] + more, "reduce-scatter": fsdp["reduce-scatter"] + PER_LAYER,
    }  # fmt: skip
    at_once = _count(*prefetch, "overlap.layers.deferred_reduce_scatter=false")
    assert at_once["reduce-scatter"] == fsdp["reduce-scatter"]


def test_what_prefetch_would_move_in_vain_is_not_run_where_all_is_waited_for(fsdp, tokens, tmp_path):
    run = {}
    for distance in (0, 1, 2):
        loop = ("overlap=prefetch", f"overlap.layers.prefetch={distance}") if distance else ()
        programs = programs_of(plan_of(GATHER, "sharding=fsdp", *loop))
        run[distance] = collectives_run(programs, tokens[0], tmp_path / str(distance))
    assert fsdp.items() <= run[0].items()  # which has the sums of scalars, too
    assert run[1] == run[2] == run[0]


def test_zero1_scatters_and_gathers_each_parameter_once_per_step():
    for num_microbatches in (1, 2):
        counts = _count("sharding=zero1", f"num_microbatches={num_microbatches}")
        assert counts == {"reduce-scatter": PER_LAYER + OUTSIDE, "all-gather": PER_LAYER + OUTSIDE}


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_zero2_scatters_each_gradient_as_it_is_made(num_microbatches):
    counts = _count("sharding=zero2", f"num_microbatches={num_microbatches}")
    assert counts == {
        "reduce-scatter": num_microbatches * (NUM_LAYERS * PER_LAYER + OUTSIDE),
        "all-gather": PER_LAYER + OUTSIDE,  # of updated parameters, a stack's as one array
    }


def test_hsdp_is_fsdp_and_one_all_reduce_of_shards_per_parameter(fsdp):
    assert _count("sharding=hsdp") == fsdp | {"all-reduce": PER_LAYER + OUTSIDE}


def test_muon_gathers_each_momentum_once_where_layers_cannot_be_spread(fsdp):
    counts = _count("sharding=fsdp", "optimizer=muon")  # three layers, eight devices
    assert counts == fsdp | {"all-gather": fsdp["all-gather"] + 7}  # matrices of a layer


def test_muon_sends_whole_layers_to_devices_where_it_can():
    counts = _count("sharding=fsdp", "optimizer=muon", "model.num_layers=8", *LINEAR_STACK)
    gathers = 2 * 8 + 2  # one matrix in each of the layers; embed and head
    # The momentum to the layers' devices and the update back.
    assert counts == {"all-gather": gathers, "reduce-scatter": 8 + 2, "all-to-all": 2}


def test_a_master_is_gathered_in_the_type_of_its_parameter():
    plan = plan_of("sharding=zero2", "precision=bfloat16_params")
    text = lower(plan, plan.mesh.of_devices(jax.devices())).train.as_text()
    assert re.findall(r"all_gather.*?-> tensor<[\dx]*x(\w+)>", text) == ["bf16"] * (PER_LAYER + OUTSIDE)
    assert set(re.findall(r"reduce_scatter.*?-> tensor<[\dx]*x(\w+)>", text, re.S)) == {"bf16"}


@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_fsdp_microbatches_add_nothing_but_their_own_gathers_and_scatters(fsdp, num_microbatches):
    counts = _count("sharding=fsdp", f"num_microbatches={num_microbatches}", "global_batch_size=32")
    assert set(counts) == set(fsdp)
    assert counts["reduce-scatter"] == num_microbatches * fsdp["reduce-scatter"]
    # XLA moves the gathers of embed and head out of the loop over microbatches: they are the same each time.
    assert counts["all-gather"] in (
        num_microbatches * fsdp["all-gather"] - outside * OUTSIDE for outside in range(num_microbatches)
    )


def test_remat_full_gathers_no_more_than_remat_none(fsdp):
    assert _count("sharding=fsdp", "remat=full") == fsdp


# Sums of activations over tensor. A layer: forward one behind attention, one behind the MLP; backward one per matmul
# that reads what is whole (3 + 2). Outside: embedding, the two halves of the softmax and the target's logit, head
# backward.
SUMS = NUM_LAYERS * (2 + 5) + 5


@pytest.mark.parametrize("remat", ["none", "full"])
def test_tensor_parallel_gathers_the_residual_stream_once_in_front_of_each_block(remat):
    counts = _count("sharding=tensor", "mesh.data=1", "mesh.tensor=8", f"remat={remat}")
    # A layer: attention and MLP each gather their input, forward and again backward, and the gradient of their output.
    # Outside: the head's input, the gradient of the embedding's output. (Accelerators reduce-scatter where CPUs sum.)
    again = NUM_LAYERS if remat == "full" else 0  # the sum behind attention; what is behind the MLP is not read again
    scales = NUM_LAYERS * 2 + 1  # gradients of norms, each of a part of the length
    assert counts == {"all-gather": NUM_LAYERS * (2 + 2 + 2) + 2, "all-reduce": SUMS + again + scales}


@pytest.mark.parametrize("mesh", [("mesh.fsdp=4", "mesh.tensor=2"), ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")])
@pytest.mark.parametrize("is_whole", [False, True])
def test_fsdp_with_tensor_moves_weights_over_fsdp_and_activations_over_tensor(fsdp, mesh, is_whole):
    counts = _count(*(WHOLE_STREAM if is_whole else ("sharding=fsdp_tensor",)), *mesh)
    gathers = 0 if is_whole else NUM_LAYERS * 6 + 2
    assert counts["all-gather"] == fsdp["all-gather"] + gathers
    assert counts["reduce-scatter"] == fsdp["reduce-scatter"]
    assert set(counts) == {"all-gather", "reduce-scatter", "all-reduce"}  # nothing is resharded


@pytest.mark.parametrize("overlap", ["xla", "prefetch"])
def test_parts_of_the_batch_send_their_own_activations_and_share_weights(overlap):
    """Twice as many of activations in a layer, of half the size; weights cross once for all parts. Gradients of a
    layer's two norms are added up for each part (accelerators add them first)."""
    whole = ("sharding=fsdp_tensor", "mesh.fsdp=2", "mesh.tensor=4", f"overlap={overlap}")
    parts, norms = (*whole, "overlap.layers.batch_parts=2"), NUM_LAYERS * 2
    more = collective_elements_per_step(_text(*parts)) - collective_elements_per_step(_text(*whole))
    assert more == {"all-reduce": norms * 32}
    assert +_count(*parts) - _count(*whole) == {
        "all-gather": NUM_LAYERS * 6, "all-reduce": NUM_LAYERS * (2 + 5) + norms,
    }  # fmt: skip


def test_a_whole_residual_stream_is_summed_and_nothing_else():
    assert _count(*WHOLE_STREAM, "mesh.fsdp=1", "mesh.tensor=8") == {"all-reduce": SUMS}


def test_gathers_are_in_the_compute_type():
    # Read from the program as lowered: the CPU compiler widens bfloat16 afterwards.
    plan = plan_of(GATHER, "sharding=fsdp", "precision=bfloat16")
    text = lower(plan, plan.mesh.of_devices(jax.devices())).train.as_text()
    gathered = re.findall(r"all_gather.*?-> tensor<[\dx]*x(\w+)>", text)
    scattered = re.findall(r"reduce_scatter.*?-> tensor<[\dx]*x(\w+)>", text, re.S)
    assert set(gathered) == {"bf16"}
    assert set(scattered) == {"f32"}
