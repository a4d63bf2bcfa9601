"""Collective matmuls: when one is chosen, what it sends, and that its sum is that of one matmul."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import WHOLE_STREAM, plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.estimate.communication import sent_bytes
from meshloom.compiler.estimate.estimate import estimate_declared, estimate_step
from meshloom.compiler.parallel.matmul import ring_reduce_scatter
from meshloom.compiler.parallel.operation import OpPlan
from meshloom.compiler.plan import Plan
from meshloom.compiler.schema import Report
from meshloom.compiler.search.candidates import applied, overlap_candidates
from meshloom.compiler.xla.programs import lower
from support.collectives import collectives_per_step
from support.commands import meshloom
from support.programs import plan_as_declared

NAMES = ("attention_output", "mlp_output")
RINGS, NO_RINGS = "parallel.matmul=collective_matmul", "parallel.matmul=plain"
TENSOR_4 = ("sharding=fsdp_tensor", "mesh.tensor=4")
LLAMA2_V5P = (
    "model=llama2_70b", "target=v5p-256", *TENSOR_4, "sequence_length=2048", "global_batch_size=256", "overlap=auto",
)  # fmt: skip


def _multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("btkd,kde->bte", x, weight)


def _split(plan: Plan) -> list[OpPlan]:
    """The matmuls whose partial results are summed over devices."""
    return [each for each in plan.operations_of("matmul") if not each.chosen.is_trivial]


@pytest.mark.cases(plain=2)
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
        lambda x, weight: ring_reduce_scatter(x, weight, "ring", _multiply, both_ways=both_ways),
        in_axes=(2, 0), out_axes=1, axis_name="ring",
    )  # fmt: skip
    expected = np.einsum("btnkd,nkde->bte", x.astype(np.float64), weight.astype(np.float64))
    np.testing.assert_allclose(on_devices(x, weight).reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("both_ways", [False, True])
def test_what_a_device_sends_is_all_but_one_shard(both_ways):
    """Around four devices: three transfers of a shard, or three of half a shard each way."""
    ring = jax.make_jaxpr(
        lambda x, w: ring_reduce_scatter(x, w, "ring", jnp.matmul, both_ways=both_ways), axis_env=[("ring", 4)]
    )
    traced = ring(jnp.zeros((2, 16, 8)), jnp.zeros((8, 6)))
    sent = [(e.invars[0].aval.size, e.params["perm"]) for e in traced.eqns if e.primitive.name == "ppermute"]
    onward, back = (((0, 1), (1, 2), (2, 3), (3, 0)), ((0, 3), (1, 0), (2, 1), (3, 2)))
    shard = 2 * 4 * 6
    expected = [(shard // 2, onward)] * 3 + [(shard // 2, back)] * 3 if both_ways else [(shard, onward)] * 3
    assert sorted(sent) == sorted(expected)


def test_a_ring_is_chosen_where_it_is_shorter():
    """By hand: a result of 16,384 tokens x 8,192 in bfloat16, 268 MB, on links of 100 GB/s each way. Scattered behind
    the matmul, 3/4 of it go both ways: 1.01 ms. In a ring an eighth goes each way, 336 µs and 7 to begin, three times,
    beside matmuls of 4,096 x 2,048 x 8,192 (attention: 299 µs of 459 TFLOP/s) and nine passes over a quarter (218 µs)
    that are not: 3 x (44 + 218) µs. The MLP's matmuls take longer than the transfers: 3 x 218 µs. Of two parts of the
    batch one waits for half of it."""
    plan = plan_as_declared(*LLAMA2_V5P)
    how = "partial results summed in a ring over tensor"
    assert [(each.site.name, each.how) for each in _split(plan)] == [
        ("attention_output", f"{how}: 785 µs of a ring not beside matmuls, 1.01 ms of a reduce-scatter"),
        ("mlp_output", f"{how}: 655 µs of a ring not beside matmuls, 1.01 ms of a reduce-scatter"),
    ]
    in_parts = plan_as_declared(*LLAMA2_V5P, "overlap.layers.batch_split=2")
    assert [(each.chosen.name, each.reason) for each in _split(in_parts)] == [
        ("plain", "806 µs of a ring not beside matmuls, 511 µs of a reduce-scatter"),  # and latencies twice
        ("plain", "655 µs of a ring not beside matmuls, 511 µs of a reduce-scatter"),
    ]


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("target=v5p-16", "sharding=fsdp"), "no mesh axis splits what 'hidden' is contracted over"),
        (("target=v5p-16", *WHOLE_STREAM, "mesh.tensor=4"),
         "partial results are on tensor, and the length of their sum is whole"),
        (("target=v5p-16", *TENSOR_4, "sequence_length=12", "global_batch_size=2"),
         "neither 1 (sequences) nor 3 (tokens of each in a shard) is even"),
        (("target=h100-8", *TENSOR_4), "the compiler for h100-8 does not overlap permutes with matmuls"),
        (("target=v5e-32", *TENSOR_4), "the compiler for v5e-32 does not overlap permutes with matmuls on more than 16 chips"),  # noqa: E501
        (("target=cpu-8", *TENSOR_4), "the compiler for cpu-8 does not overlap permutes with matmuls"),
    ],
)  # fmt: skip
def test_where_parts_are_added_up_at_once(overrides, why):
    made = {each.site.name: each for each in plan_of("overlap=prefetch", *overrides).operations_of("matmul")}
    assert {each.chosen.name for each in made.values()} == {"plain"}
    assert made["mlp_output"].reason == f"collective_matmul is not used: {why}"


def test_a_plain_matmul_may_be_demanded():
    (attention, mlp) = _split(plan_of("overlap=prefetch", "target=v5p-16", *TENSOR_4, NO_RINGS))
    assert (attention.chosen.name, mlp.chosen.name, mlp.reason) == ("plain", "plain", "parallel.matmul=plain")


def test_a_ring_that_takes_longer_is_not_chosen():
    """16 tokens of a small model: the links' latency, three times, is more than a reduce-scatter's."""
    plans = _split(plan_of("target=v5p-16", *TENSOR_4, "overlap=prefetch", "precision=bfloat16"))
    assert len(plans) == 2
    assert all(each.chosen.name == "plain" and each.reason.endswith("of a reduce-scatter") for each in plans)


def test_sites_are_told_that_no_matmul_has_or_that_no_ring_can_sum():
    with pytest.raises(ConfigError) as error:
        plan_of(
            "sharding=fsdp", "parallel.matmul={mlp_output:collective_matmul,mlp_outputs:plain}",
            "parallel.lm_head=vocab_chunks", "model.embeddings=tied",
        )  # fmt: skip
    first, second, head = error.value.problems
    assert first.where == "parallel.matmul.mlp_output"
    assert first.what == ("'collective_matmul' cannot be used: no mesh axis splits what 'hidden' is contracted over")
    assert second.where == "parallel.matmul.mlp_outputs"
    assert second.fix.startswith("did you mean 'mlp_output'?")
    assert head.where == "parallel.lm_head"


@pytest.mark.parametrize("value", ["7", "[all]", "{mlp_output:[1]}"])
def test_what_is_neither_a_strategy_nor_strategies_by_name_is_one_error(value):
    with pytest.raises(ConfigError) as error:
        plan_of(f"parallel.matmul={value}")
    (problem,) = error.value.problems
    assert problem.where == "parallel.matmul"
    assert problem.fix == "set auto, a strategy, or {NAME: STRATEGY}"


def test_every_matmul_of_a_decoder_is_a_site():
    names = [each.site.name for each in plan_of().operations_of("matmul")]
    assert names == ["queries", "keys", "values", "attention_output", "mlp_up", "mlp_gate", "mlp_output", "logits"]


@pytest.mark.ci
def test_permutes_take_the_place_of_sums_and_are_planned():
    """Eight devices, tensor=4: of each of three layers two matmuls, three transfers each."""
    found = {}
    for rings in (NO_RINGS, RINGS):
        plan = plan_of(*TENSOR_4, rings)
        hlo = lower(plan, plan.mesh.of_devices(jax.devices()), ("train",))["train"].compile().as_text()
        found[rings] = collectives_per_step(hlo)
    gone, new = found[NO_RINGS] - found[RINGS], found[RINGS] - found[NO_RINGS]
    assert new == {"collective-permute": 3 * 2 * 3}
    assert gone == {"all-reduce": 3 * 2}, "on CPUs a sum over devices is whole"
    planned = [one for one in estimate_step(plan).communication if one.kind == "collective-permute"]
    assert {one.origin.name: one.count for one in planned} == {f"{name}, in a ring": 3 * 3 for name in NAMES}


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
    candidates = overlap_candidates(plan, estimate_declared(plan))
    assert {one.way.strategies for one in candidates} == {("collective_matmul",), ("plain",)}
    first = {(one.way.strategies, one.way.layers.batch_split) for one in candidates[:4]}
    assert first == set(product((("collective_matmul",), ("plain",)), (1, 2))), "the best of each before any other"
    for one in (candidates[0], next(one for one in candidates if one.way.strategies == ("plain",))):
        pinned, made = plan_as_declared(*LLAMA2_V5P, *one.overrides).spec, applied(one.way, plan.spec)
        assert (pinned.overlap, pinned.parallel) == (made.overlap, made.parallel)
    told = plan_as_declared(*LLAMA2_V5P, NO_RINGS)
    assert {one.way.strategies for one in overlap_candidates(told, estimate_declared(told))} == {("plain",)}


def test_the_model_of_what_is_exposed_prefers_rings_where_nothing_else_runs_beside_a_sum():
    """As programs do (docs/tensor_parallelism.md): 353 ms against 357 at once, 351 against 347 in two parts."""
    plan = plan_as_declared(*LLAMA2_V5P)
    candidates = overlap_candidates(plan, estimate_declared(plan))
    by_way = {one.way.model_dump_json(): one.wait.seconds for one in candidates}
    for one in candidates:
        if "collective_matmul" in one.way.strategies and "sparse_core" in one.way.flag_presets:
            at_once = by_way[one.way.model_copy(update={"parallel": {"matmul": "plain"}}).model_dump_json()]
            assert (one.wait.seconds < at_once) == (one.way.layers.batch_split == 1), one.way.name


@pytest.mark.tpu
@pytest.mark.release
def test_on_a_tpu_transfers_run_beside_the_matmuls(tmp_path):
    """Two layers of llama3_8b's shapes on 16 chips, four of them around each ring."""
    pytest.importorskip("libtpu", reason="pip install -e '.[tpu]'")
    ways = {
        "at once": (NO_RINGS,),
        "rings": ("parallel.matmul=auto",),
        "two parts": (NO_RINGS, "overlap.layers.batch_split=2"),
    }
    reports = {}
    for name, way in ways.items():
        folder = tmp_path / name.replace(" ", "_")
        done = meshloom(
            "compile", "model=llama3_8b", "model.num_layers=2", "model.vocab_size=4096", "target=v6e-16", *TENSOR_4,
            "sequence_length=2048", "global_batch_size=64", "data=synthetic", "remat=full", "overlap=xla",
            "overlap.flag_presets=[sparse_core,no_windowed_einsum]", *way, f"hydra.run.dir={folder}", cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        reports[name] = Report.model_validate_json((folder / "report.json").read_text())
    rings = [one for one in reports["rings"].collectives if "in a ring" in one.source]
    assert {one.source for one in rings} >= {f"{name}, in a ring, forward" for name in NAMES}
    assert all(one.kind == "collective-permute" and one.is_async for one in rings)
    hidden, alone = (sum(getattr(one, key) or 0.0 for one in rings) for key in ("hidden_seconds", "alone_seconds"))
    assert hidden > alone / 4
    assert not [finding for finding in reports["rings"].findings if "permute" in finding.what]
    seconds = {name: report.compiled.step_seconds or 0.0 for name, report in reports.items()}
    assert max(seconds["rings"], seconds["two parts"]) < seconds["at once"]
    exposed = {
        name: sum(one.exposed_seconds or 0.0 for one in report.collectives if one.mesh_axes == ("tensor",))
        for name, report in reports.items()
    }
    assert exposed["two parts"] < 0.8 * exposed["at once"], "0.76 by libtpu 0.0.42.1"
