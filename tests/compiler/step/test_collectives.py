"""What crosses the network in a step, counted with the trips of its loops.

Along the axes that split the batch the step itself says what crosses: it is counted as written, and in a release as
compiled, too. What is left to the partitioner is counted in the compiled program. The embedding's table is gathered, as
all other weights are; where its rows are exchanged tests/compiler/parallel/test_embedding.py counts.
"""

import re
from functools import cache

import jax
import pytest

from conftest import LINEAR_STACK, WHOLE_STREAM, plan_of
from meshloom.compiler.xla.programs import lower
from support.collectives import (
    collective_elements_per_step,
    collectives_per_step,
    collectives_run,
    largest_outside_loops,
    written_collectives,
)
from support.programs import lowered_of, programs_of

NUM_LAYERS, PER_LAYER, OUTSIDE = 3, 9, 3  # parameters of a small decoder: in a layer, in embed and head


IN_BACKWARD = "overlap.layers.reduce_in_backward=true"
GATHER = "parallel.embedding=all_gather"


@cache
def written(*overrides: str):
    """(counts, elements), by kind."""
    counts, elements = written_collectives(plan_of(GATHER, *overrides))
    return +counts, +elements


def _text(*overrides: str) -> str:
    return programs_of(plan_of(GATHER, *overrides))["train"].as_text()


@cache
def compiled(*overrides: str):
    """The same, of the compiled program."""
    text = _text(*overrides)
    return +collectives_per_step(text), +collective_elements_per_step(text)


def is_known(proof, *declarations):
    """Returns True if the test has passed with the programs that these declarations are lowered to."""
    plans = [plan_of(GATHER, *overrides) for overrides in declarations]
    return proof.is_known(
        [lowered_of(plan, "train") for plan in plans], str(sorted(written("sharding=fsdp")[0].items()))
    )


@pytest.fixture(params=[written, pytest.param(compiled, marks=pytest.mark.release)], ids=["written", "compiled"])
def found(request):
    return request.param


@pytest.mark.ci
@pytest.mark.parametrize(
    "overrides",
    [
        ("sharding=ddp",),
        ("sharding=fsdp", "remat=full"),
        ("sharding=zero2", "num_microbatches=2"),
        ("sharding=hsdp", "overlap=prefetch", IN_BACKWARD),
    ],
    ids=" ".join,
)
def test_what_is_written_is_what_is_compiled(overrides, proof):
    counts, _ = written(*overrides)
    if proof.is_known(lowered_of(plan_of(GATHER, *overrides), "train"), str(sorted(counts.items()))):
        return
    assert compiled(*overrides)[0] == counts


def test_ddp_is_one_all_reduce_per_parameter_and_nothing_else(found):
    counts, _ = found("sharding=ddp")
    assert counts == {"all-reduce": PER_LAYER + OUTSIDE}  # a stack's gradients are reduced as one array


@pytest.mark.ci
def test_ddp_reduces_once_per_step_whatever_the_microbatches(found):
    batch = "global_batch_size=32"
    assert found("sharding=ddp", "num_microbatches=4", batch)[0] == found("sharding=ddp", batch)[0]


@pytest.mark.parametrize("num_microbatches", [pytest.param(1, marks=pytest.mark.ci), 2])
def test_ddp_reduces_in_the_last_backward_pass_what_it_reduced_behind_it(found, num_microbatches):
    counts, elements = found("sharding=ddp", IN_BACKWARD, f"num_microbatches={num_microbatches}")
    assert counts == {"all-reduce": NUM_LAYERS * PER_LAYER + OUTSIDE}
    assert elements == found("sharding=ddp")[1]


@pytest.mark.ci
def test_ddp_reduces_layers_in_their_loop(proof):
    if is_known(proof, ("sharding=ddp", IN_BACKWARD)):
        return
    text = _text("sharding=ddp", IN_BACKWARD)
    assert largest_outside_loops(text, "all-reduce") == 257 * 32 + 7 * 32  # embed and head; the vocabulary padded


def test_prefetch_reduces_one_layer_more_in_backward(found):
    counts, _ = found("sharding=ddp", "overlap=prefetch", IN_BACKWARD)
    assert counts == {"all-reduce": (NUM_LAYERS + 1) * PER_LAYER + OUTSIDE}
    counts, _ = found("sharding=hsdp", "overlap=prefetch", IN_BACKWARD)
    assert counts == found("sharding=fsdp", "overlap=prefetch")[0] | {"all-reduce": counts["reduce-scatter"]}


@pytest.mark.parametrize("num_microbatches", [pytest.param(1, marks=pytest.mark.ci), 2])
def test_hsdp_sums_shards_over_replicas_in_the_last_backward_pass(found, num_microbatches):
    counts, elements = found("sharding=hsdp", IN_BACKWARD, f"num_microbatches={num_microbatches}")
    assert counts["all-reduce"] == NUM_LAYERS * PER_LAYER + OUTSIDE
    assert counts["reduce-scatter"] == num_microbatches * (NUM_LAYERS * PER_LAYER + OUTSIDE)
    assert elements["all-reduce"] == found("sharding=hsdp")[1]["all-reduce"]


@pytest.mark.ci
def test_zero1_in_backward_is_zero2_where_there_is_one_microbatch(found):
    assert found("sharding=zero1", IN_BACKWARD)[0] == found("sharding=zero2")[0]
    accumulated, _ = found("sharding=zero1", IN_BACKWARD, "num_microbatches=2")
    assert accumulated == {"reduce-scatter": NUM_LAYERS * PER_LAYER + OUTSIDE, "all-gather": PER_LAYER + OUTSIDE}


def test_fsdp_leaves_nothing_to_reduce_in_backward():
    plans = [plan_of(GATHER, "sharding=fsdp", "num_microbatches=2", *chosen) for chosen in ((), (IN_BACKWARD,))]
    texts = [lower(plan, plan.mesh.of_devices(jax.devices()), ["train"])["train"].as_text() for plan in plans]
    assert texts[0] == texts[1]


def test_fsdp_gathers_twice_and_reduce_scatters_once(found):
    # Forward and backward gather a layer; what embed and head gathered for the forward pass serves the backward too.
    assert found("sharding=fsdp")[0] == {
        "all-gather": 2 * NUM_LAYERS * PER_LAYER + OUTSIDE,
        "reduce-scatter": NUM_LAYERS * PER_LAYER + OUTSIDE,
    }


@pytest.mark.parametrize("distance", [pytest.param(1, marks=pytest.mark.ci), 2])
def test_prefetch_gathers_so_many_layers_more_and_reduces_one_more(found, distance):
    prefetch = ("sharding=fsdp", "overlap=prefetch", f"overlap.layers.prefetch={distance}")
    fsdp, more = found("sharding=fsdp")[0], distance * PER_LAYER
    # Forward: the first layers before the loop, and in it the last ones again, with which the backward pass begins.
    assert found(*prefetch)[0] == {
        "all-gather": fsdp["all-gather"] + more, "reduce-scatter": fsdp["reduce-scatter"] + PER_LAYER,
    }  # fmt: skip
    at_once, _ = found(*prefetch, "overlap.layers.deferred_reduce_scatter=false")
    assert at_once["reduce-scatter"] == fsdp["reduce-scatter"]


@pytest.mark.ci
def test_what_prefetch_would_move_in_vain_is_not_run_where_all_is_waited_for(tokens, tmp_path):
    run = {}
    for distance in (0, 2):
        loop = ("overlap=prefetch", f"overlap.layers.prefetch={distance}") if distance else ()
        programs = programs_of(plan_of(GATHER, "sharding=fsdp", *loop))
        run[distance] = collectives_run(programs, tokens[0], tmp_path / str(distance))
    assert written("sharding=fsdp")[0].items() <= run[0].items()  # which has the sums of scalars, too
    assert run[2] == run[0]


def test_zero1_scatters_and_gathers_each_parameter_once_per_step(found):
    for num_microbatches in (1, 2):
        counts, _ = found("sharding=zero1", f"num_microbatches={num_microbatches}")
        assert counts == {"reduce-scatter": PER_LAYER + OUTSIDE, "all-gather": PER_LAYER + OUTSIDE}


@pytest.mark.parametrize("num_microbatches", [pytest.param(1, marks=pytest.mark.ci), 2])
def test_zero2_scatters_each_gradient_as_it_is_made(found, num_microbatches):
    counts, _ = found("sharding=zero2", f"num_microbatches={num_microbatches}")
    assert counts == {
        "reduce-scatter": num_microbatches * (NUM_LAYERS * PER_LAYER + OUTSIDE),
        "all-gather": PER_LAYER + OUTSIDE,  # of updated parameters, a stack's as one array
    }


def test_hsdp_is_fsdp_and_one_all_reduce_of_shards_per_parameter(found):
    assert found("sharding=hsdp")[0] == found("sharding=fsdp")[0] | {"all-reduce": PER_LAYER + OUTSIDE}


@pytest.mark.ci
def test_muon_gathers_each_momentum_once_where_layers_cannot_be_spread(proof):
    muon = ("sharding=fsdp", "optimizer=muon")
    if is_known(proof, muon):
        return
    fsdp, (counts, _) = written("sharding=fsdp")[0], compiled(*muon)  # 3 layers, 8 devices
    assert counts == fsdp | {"all-gather": fsdp["all-gather"] + 7}  # matrices of a layer


@pytest.mark.ci
def test_muon_sends_whole_layers_to_devices_where_it_can(proof):
    muon = ("sharding=fsdp", "optimizer=muon", "model.num_layers=8", *LINEAR_STACK)
    if is_known(proof, muon):
        return
    counts, _ = compiled(*muon)
    gathers = 2 * 8 + 2  # one matrix in each of the layers; embed and head
    # The momentum to the layers' devices and the update back.
    assert counts == {"all-gather": gathers, "reduce-scatter": 8 + 2, "all-to-all": 2}


def test_a_master_is_gathered_in_the_type_of_its_parameter():
    plan = plan_of("sharding=zero2", "precision=bfloat16_params")
    text = lower(plan, plan.mesh.of_devices(jax.devices()), ["train"])["train"].as_text()
    assert re.findall(r"all_gather.*?-> tensor<[\dx]*x(\w+)>", text) == ["bf16"] * (PER_LAYER + OUTSIDE)
    assert set(re.findall(r"reduce_scatter.*?-> tensor<[\dx]*x(\w+)>", text, re.S)) == {"bf16"}


@pytest.mark.parametrize("num_microbatches", [2, pytest.param(4, marks=pytest.mark.ci)])
def test_fsdp_microbatches_add_nothing_but_their_own_gathers_and_scatters(found, num_microbatches):
    fsdp, _ = found("sharding=fsdp")
    counts, _ = found("sharding=fsdp", f"num_microbatches={num_microbatches}", "global_batch_size=32")
    assert set(counts) == set(fsdp)
    assert counts["reduce-scatter"] == num_microbatches * fsdp["reduce-scatter"]
    # XLA moves the gathers of embed and head out of the loop over microbatches: they are the same each time.
    assert counts["all-gather"] in (
        num_microbatches * fsdp["all-gather"] - outside * OUTSIDE for outside in range(num_microbatches)
    )


@pytest.mark.ci
def test_remat_full_gathers_no_more_than_remat_none(found):
    assert found("sharding=fsdp", "remat=full")[0] == found("sharding=fsdp")[0]


# Sums of activations over tensor. A layer: forward one behind attention, one behind the MLP; backward one per matmul
# that reads what is whole (3 + 2). Outside: embedding, the two halves of the softmax and the target's logit, head
# backward.
SUMS = NUM_LAYERS * (2 + 5) + 5


@pytest.mark.parametrize(
    "remat", [pytest.param("none", marks=pytest.mark.release), pytest.param("full", marks=pytest.mark.ci)]
)
def test_tensor_parallel_gathers_the_residual_stream_once_in_front_of_each_block(remat, proof):
    tensor = ("sharding=tensor", "mesh.data=1", "mesh.tensor=8", f"remat={remat}")
    if is_known(proof, tensor):
        return
    counts, _ = compiled(*tensor)
    # A layer: attention and MLP each gather their input, forward and again backward, and the gradient of their output.
    # Outside: the head's input, the gradient of the embedding's output. (Accelerators reduce-scatter where CPUs sum.)
    again = NUM_LAYERS if remat == "full" else 0  # the sum behind attention; what is behind the MLP is not read again
    scales = NUM_LAYERS * 2 + 1  # gradients of norms, each of a part of the length
    assert counts == {"all-gather": NUM_LAYERS * (2 + 2 + 2) + 2, "all-reduce": SUMS + again + scales}


@pytest.mark.parametrize(
    ("mesh", "is_whole"),
    [
        pytest.param(("mesh.fsdp=4", "mesh.tensor=2"), False, marks=pytest.mark.release),
        pytest.param(("mesh.fsdp=4", "mesh.tensor=2"), True, marks=pytest.mark.ci),
        pytest.param(("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"), False, marks=pytest.mark.ci),
        pytest.param(("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"), True, marks=pytest.mark.release),
    ],
)
def test_fsdp_with_tensor_moves_weights_over_fsdp_and_activations_over_tensor(mesh, is_whole, proof):
    both = (*(WHOLE_STREAM if is_whole else ("sharding=fsdp_tensor",)), *mesh)
    if is_known(proof, both):
        return
    (fsdp, _), (counts, _) = written("sharding=fsdp"), compiled(*both)
    gathers = 0 if is_whole else NUM_LAYERS * 6 + 2
    assert counts["all-gather"] == fsdp["all-gather"] + gathers
    assert counts["reduce-scatter"] == fsdp["reduce-scatter"]
    assert set(counts) == {"all-gather", "reduce-scatter", "all-reduce"}  # nothing is resharded


@pytest.mark.parametrize(
    "overlap", [pytest.param("xla", marks=pytest.mark.release), pytest.param("prefetch", marks=pytest.mark.ci)]
)
def test_parts_of_the_batch_send_their_own_activations_and_share_weights(overlap, proof):
    """Twice as many of activations in a layer, of half the size; weights cross once for all parts. Gradients of a
    layer's two norms are added up for each part (accelerators add them first)."""
    whole = ("sharding=fsdp_tensor", "mesh.fsdp=2", "mesh.tensor=4", f"overlap={overlap}")
    parts, norms = (*whole, "overlap.layers.batch_split=2"), NUM_LAYERS * 2
    if is_known(proof, parts, whole):
        return
    assert compiled(*parts)[1] - compiled(*whole)[1] == {"all-reduce": norms * 32}
    assert compiled(*parts)[0] - compiled(*whole)[0] == {
        "all-gather": NUM_LAYERS * 6, "all-reduce": NUM_LAYERS * (2 + 5) + norms,
    }  # fmt: skip


@pytest.mark.release
def test_a_whole_residual_stream_is_summed_and_nothing_else():
    assert compiled(*WHOLE_STREAM, "mesh.fsdp=1", "mesh.tensor=8")[0] == {"all-reduce": SUMS}


def test_gathers_are_in_the_compute_type():
    # Read from the program as lowered: the CPU compiler widens bfloat16 afterwards.
    plan = plan_of(GATHER, "sharding=fsdp", "precision=bfloat16")
    text = lower(plan, plan.mesh.of_devices(jax.devices()), ["train"])["train"].as_text()
    gathered = re.findall(r"all_gather.*?-> tensor<[\dx]*x(\w+)>", text)
    scattered = re.findall(r"reduce_scatter.*?-> tensor<[\dx]*x(\w+)>", text, re.S)
    assert set(gathered) == {"bf16"}
    assert set(scattered) == {"f32"}
