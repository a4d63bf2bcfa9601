"""Matmuls whose parts are added up in a ring: what is decided, what crosses, and that the sum is that of one matmul."""

import re
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import LINEAR_STACK, WHOLE_STREAM, plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.estimate.communication import sent_bytes
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.parallel.matmul import add_up_in_ring
from meshloom.compiler.schema import Report
from meshloom.compiler.search.candidates import find_candidates
from meshloom.compiler.sharding.arrays import find_arrays
from meshloom.compiler.xla.programs import lower
from meshloom.models import Context, Params
from support.helpers import collectives_per_step, meshloom, plan_as_declared

NAMES = ("attention_output", "mlp_output")
RINGS, NO_RINGS = f"overlap.rings=[{','.join(NAMES)}]", "overlap.rings=[]"
TENSOR_4 = ("sharding=fsdp_tensor", "mesh.tensor=4")
LLAMA2_V5P = (
    "model=llama2_70b", "target=v5p-256", *TENSOR_4, "sequence_length=2048", "global_batch_size=256", "overlap=auto",
)  # fmt: skip


@pytest.mark.parametrize(
    ("num_devices", "both_ways", "num_sequences"),
    [
        (2, True, 1),
        (3, False, 2),
        (4, True, 2),
        pytest.param(4, False, 1, marks=pytest.mark.ci),
        pytest.param(8, True, 1, marks=pytest.mark.ci),
        pytest.param(3, True, 1, marks=pytest.mark.ci),
        pytest.param(8, False, 2, marks=pytest.mark.ci),
    ],
)
def test_each_device_has_its_shard_of_the_whole_sum(num_devices, both_ways, num_sequences):
    """Against one matmul in float64, with the devices as a mapped dimension. One sequence is halved by its tokens."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_sequences, 4 * num_devices, num_devices, 3, 5)).astype(np.float32)
    weight = rng.normal(size=(num_devices, 3, 5, 6)).astype(np.float32)
    on_devices = jax.vmap(
        lambda x, weight: add_up_in_ring(x, weight, "ring", both_ways=both_ways),
        in_axes=(2, 0), out_axes=1, axis_name="ring",
    )  # fmt: skip
    expected = np.einsum("btnkd,nkde->bte", x.astype(np.float64), weight.astype(np.float64))
    np.testing.assert_allclose(on_devices(x, weight).reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("both_ways", [False, True])
def test_what_a_device_sends_is_all_but_one_shard(both_ways):
    """Around four devices: three transfers of a shard, or three of half a shard each way."""
    ring = jax.make_jaxpr(lambda x, w: add_up_in_ring(x, w, "ring", both_ways=both_ways), axis_env=[("ring", 4)])
    traced = ring(jnp.zeros((2, 16, 8)), jnp.zeros((8, 6)))
    sent = [(e.invars[0].aval.size, e.params["perm"]) for e in traced.eqns if e.primitive.name == "ppermute"]
    onward, back = (((0, 1), (1, 2), (2, 3), (3, 0)), ((0, 3), (1, 0), (2, 1), (3, 2)))
    shard = 2 * 4 * 6
    expected = [(shard // 2, onward)] * 3 + [(shard // 2, back)] * 3 if both_ways else [(shard, onward)] * 3
    assert sorted(sent) == sorted(expected)


def test_a_ring_is_chosen_where_it_is_shorter():
    """By hand: a result of 16,384 tokens x 8,192 in bfloat16, 268 MB, on links of 90 GB/s each way. Scattered behind
    the matmul, 3/4 of it go both ways: 1.12 ms. In a ring an eighth goes each way, 373 µs, three times, beside matmuls
    of 4,096 x 2,048 x 8,192 (attention: 299 µs of 459 TFLOP/s) and nine passes over a quarter (218 µs) that are not:
    3 x (74 + 218) µs. The MLP's matmuls take longer than the transfers: 3 x 218 µs. Of two parts of the batch one waits
    for half of it."""
    plan = plan_as_declared(*LLAMA2_V5P)
    assert [each.how for each in plan.projections] == [
        "parts of attention_output are added up in a ring over tensor: 878 µs not beside matmuls, 1.12 ms behind it",
        "parts of mlp_output are added up in a ring over tensor: 655 µs not beside matmuls, 1.12 ms behind it",
    ]
    in_parts = plan_as_declared(*LLAMA2_V5P, "overlap.layers.batch_parts=2")
    assert [(each.ring, each.reason) for each in in_parts.projections] == [
        (None, "881 µs not beside matmuls, 561 µs behind it"),  # and latencies twice
        (None, "655 µs not beside matmuls, 561 µs behind it"),
    ]


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("target=v5p-16", "sharding=fsdp"), "no mesh axis splits what 'hidden' is contracted over"),
        (("target=v5p-16", *WHOLE_STREAM, "mesh.tensor=4"), "they are over tensor, and its length is whole"),
        (("target=v5p-16", *TENSOR_4, "sequence_length=12", "global_batch_size=2"),
         "neither 1 (sequences) nor 3 (tokens of each in a shard) is even"),
        (("target=h100-8", *TENSOR_4), "the compiler for h100-8 runs no permutes beside matmuls"),
        (("target=v5e-32", *TENSOR_4), "the compiler for v5e-32 runs no permutes beside matmuls on more than 16 chips"),
        (("target=cpu-8", *TENSOR_4), "the compiler for cpu-8 runs no permutes beside matmuls"),
        (("target=v5p-16", *TENSOR_4, NO_RINGS), "overlap.rings leaves it out"),
    ],
)  # fmt: skip
def test_where_parts_are_added_up_at_once(overrides, why):
    plan = plan_of("overlap=prefetch", *overrides)
    assert [each.ring for each in plan.projections] == [None, None]
    assert plan.projections[1].reason == why


def test_a_ring_that_takes_longer_is_not_chosen():
    """16 tokens of a small model: the links' latency, three times, is more than a reduce-scatter's."""
    plans = plan_of("target=v5p-16", *TENSOR_4, "overlap=prefetch", "precision=bfloat16").projections
    assert all(each.ring is None and each.reason.endswith("behind it") for each in plans)


def test_names_are_told_that_no_matmul_has_or_that_no_ring_can_make():
    with pytest.raises(ConfigError) as error:
        plan_of(
            "sharding=fsdp", "overlap.rings=[mlp_output, mlp_outputs]", "overlap.head=parts", "model.embeddings=tied"
        )
    first, second, head = error.value.problems
    assert (first.where, second.where, head.where) == ("overlap.rings[0]", "overlap.rings[1]", "overlap.head")
    assert first.what == (
        "'mlp_output' cannot be added up in a ring: no mesh axis splits what 'hidden' is contracted over"
    )
    assert second.fix == "use one of attention_output, mlp_output (did you mean 'mlp_output'?)"


@pytest.mark.parametrize("value", ["7", "all", "[1,a]"])
def test_what_is_neither_auto_nor_names_is_one_error(value):
    with pytest.raises(ConfigError) as error:
        plan_of(f"overlap.rings={value}")
    (problem,) = error.value.problems
    assert problem.where == "overlap.rings"
    assert problem.fix == "set auto, or give a list"


@pytest.mark.parametrize(
    ("name", "reshape", "said"),
    [
        ("nothing", (), "model.family: 'nothing' is projected, and no activation"),
        ("residual", (4, 8), "project('residual'): (16, 16, 4, 8) and (32, 32) are not (B, T, *K) and (*K, E)"),
    ],
)
def test_a_model_that_projects_wrongly_is_told(name, reshape, said):
    plan = plan_of(*LINEAR_STACK)
    (stack,) = plan.model.stacks

    def apply(params: Params, x: jax.Array, context: Context) -> jax.Array:
        x = x.reshape(*x.shape[:2], *reshape) if reshape else x
        return context.activation("residual", context.project(name, x, params["kernel_EM"]), "batch", "length", "embed")

    model = replace(plan.model, stacks=(replace(stack, layer=replace(stack.layer, apply=apply)),))
    with pytest.raises((ConfigError, ValueError), match=re.escape(said)):
        find_arrays(plan.spec, model)


@pytest.mark.ci
def test_permutes_take_the_place_of_sums_and_are_planned():
    """Eight devices, tensor=4: of each of three layers two matmuls, three transfers each."""
    found = {}
    for rings in (NO_RINGS, RINGS):
        plan = plan_of(*TENSOR_4, rings)
        hlo = lower(plan, plan.mesh.of_devices(jax.devices()), ("train",)).train.compile().as_text()
        found[rings] = collectives_per_step(hlo)
    gone, new = found[NO_RINGS] - found[RINGS], found[RINGS] - found[NO_RINGS]
    assert new == {"collective-permute": 3 * 2 * 3}
    assert gone == {"all-reduce": 3 * 2}, "on CPUs a sum over devices is whole"
    planned = [one for one in estimate_step(plan).communication if one.kind == "collective-permute"]
    assert {one.source: one.count for one in planned} == {f"{name}, in a ring": 3 * 3 for name in NAMES}


@pytest.mark.ci
def test_a_ring_sends_what_a_reduce_scatter_does():
    sent = {}
    for rings in (RINGS, NO_RINGS):
        for one in estimate_step(plan_as_declared(*LLAMA2_V5P, "remat=full", rings)).communication:
            if one.mesh_axes == ("tensor",):
                sent[rings, one.kind] = sent.get((rings, one.kind), 0) + sent_bytes(one)
    by_permutes = sent[RINGS, "collective-permute"]
    assert by_permutes == sent[NO_RINGS, "reduce-scatter"] - sent[RINGS, "reduce-scatter"]
    assert by_permutes == 80 * 3 * (16384 * 8192 * 2 * 3 // 4), "of each layer two forward, and attention's again"


@pytest.mark.ci
def test_a_search_tries_with_rings_and_without_and_pins_what_it_took():
    plan = plan_as_declared(*LLAMA2_V5P)
    candidates = find_candidates(plan, estimate_step(plan))
    assert {one.way.rings for one in candidates} == {NAMES, ()}
    first = {(one.way.rings, one.way.layers.batch_parts) for one in candidates[:4]}
    assert first == set(product((NAMES, ()), (1, 2))), "the best of each before any other"
    for one in (candidates[0], next(one for one in candidates if not one.way.rings)):
        assert plan_as_declared(*LLAMA2_V5P, *one.overrides()).spec.overlap == one.applied_to(plan.spec).overlap
    told = plan_as_declared(*LLAMA2_V5P, NO_RINGS)
    assert {one.way.rings for one in find_candidates(told, estimate_step(told))} == {()}


def test_the_model_of_what_is_exposed_prefers_rings_where_nothing_else_runs_beside_a_sum():
    """As programs do (docs/tensor_parallelism.md): 353 ms against 357 at once, 351 against 347 in two parts."""
    plan = plan_as_declared(*LLAMA2_V5P)
    candidates = find_candidates(plan, estimate_step(plan))
    by_way = {one.way.model_dump_json(): one.expected_seconds for one in candidates}
    for one in candidates:
        if one.way.rings and "sparse_core" in one.way.option_sets:
            at_once = by_way[one.way.model_copy(update={"rings": ()}).model_dump_json()]
            assert (one.expected_seconds < at_once) == (one.way.layers.batch_parts == 1), one.name


@pytest.mark.tpu
@pytest.mark.release
def test_on_a_tpu_transfers_run_beside_the_matmuls(tmp_path):
    """Two layers of llama3_8b's shapes on 16 chips, four of them around each ring."""
    pytest.importorskip("libtpu", reason="pip install -e '.[tpu]'")
    ways = {
        "at once": (NO_RINGS,),
        "rings": ("overlap.rings=auto",),
        "two parts": (NO_RINGS, "overlap.layers.batch_parts=2"),
    }
    reports = {}
    for name, way in ways.items():
        folder = tmp_path / name.replace(" ", "_")
        done = meshloom(
            "compile", "model=llama3_8b", "model.num_layers=2", "model.vocab_size=4096", "target=v6e-16", *TENSOR_4,
            "sequence_length=2048", "global_batch_size=64", "data=synthetic", "remat=full", "overlap=xla",
            "overlap.option_sets=[sparse_core,no_windowed_einsum]", *way, f"hydra.run.dir={folder}", cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        reports[name] = Report.model_validate_json((folder / "report.json").read_text())
    rings = [one for one in reports["rings"].collectives if "in a ring" in one.source]
    assert {one.source for one in rings} >= {f"{name}, in a ring, forward" for name in NAMES}
    assert all(one.kind == "collective-permute" and one.is_async for one in rings)
    hidden, alone = (sum(getattr(one, key) or 0.0 for one in rings) for key in ("hidden_seconds", "alone_seconds"))
    assert hidden > alone / 4
    assert not [finding for finding in reports["rings"].findings if "permute" in finding.what]
    seconds = {name: report.step.predicted_seconds or 0.0 for name, report in reports.items()}
    assert max(seconds["rings"], seconds["two parts"]) < seconds["at once"]
    exposed = {
        name: sum(one.exposed_seconds or 0.0 for one in report.collectives if one.mesh_axes == ("tensor",))
        for name, report in reports.items()
    }
    assert exposed["two parts"] < 0.8 * exposed["at once"], "0.76 by libtpu 0.0.42.1"
