"""Which exchange takes tokens to their experts, what it costs, and what is refused before anything is traced."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from conftest import plan_of
from meshloom.compiler.analysis.schedule_analysis import chip_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.kernels import KernelArray, KernelCall, KernelCost
from meshloom.compiler.core.scopes import FILLED, LARGEST_TILE, OperationName, RowTile
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.estimate.estimated_step import read_step
from meshloom.compiler.estimate.regions import price_regions
from meshloom.compiler.jaxpr.flops import count_model_flops
from meshloom.compiler.parallel.experts.dispatch import Experts
from meshloom.compiler.parallel.experts.expert_exchange import ExchangeSizes
from meshloom.compiler.parallel.experts.experts import experts_scope
from meshloom.compiler.parallel.experts.grouped_matmul import best_tile, grouped_cost, tile_width
from meshloom.compiler.parallel.registry import OPERATIONS
from meshloom.compiler.spec import kernel_rates
from meshloom.compiler.spec.compiler_traits import read_compiler_traits
from meshloom.compiler.spec.figure_source import FigureSource
from meshloom.compiler.spec.kernel_rates import GroupedKernel, grouped_kernels
from meshloom.compiler.tune.space import mesh_axes
from meshloom.compiler.xla.hlo import parse_module
from meshloom.compiler.xla.schedule.prices import Chip, price_instruction
from meshloom.compiler.xla.schedule.steps import Compute
from meshloom.models.parts import ExpertGroups, route
from support.experts import MOE
from support.programs import plan_as_declared, target_of

EXPERT = ("sharding=fsdp_expert", "target=cpu-4", "mesh.fsdp=2", "mesh.expert=2")
OVER_TENSOR = (
    "sharding.parameters=[{logical:[experts],mesh:[tensor]},{logical:[embed],mesh:[fsdp]},"
    "{logical:[layers,vocab,mlp,heads,kv_heads,head_dim],mesh:[]}]"
)
OVER_TWO = (
    "sharding.parameters=[{logical:[experts],mesh:[fsdp,expert]},{logical:[embed],mesh:[]},"
    "{logical:[layers,vocab,mlp,heads,kv_heads,head_dim],mesh:[]}]"
)
MIXTRAL = ("model=mixtral_8x7b", "sharding=fsdp_expert", "model.num_layers=2", "global_batch_size=256",
           "sequence_length=2048", "remat=full", "moe.max_imbalance=2")  # fmt: skip


def _problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        plan_of(*MOE, *overrides)
    return str(raised.value)


@pytest.mark.cases(plain=9)
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("sharding=fsdp_expert", "model.num_experts=6", "mesh.fsdp=2", "mesh.expert=4"),
         ("dimension 1 (experts) has size 6, not divisible by 4 shards (expert=4)", "make model.num_experts 4 or 8")),
        (("model.num_experts_per_token=9",), ("model.num_experts_per_token: a token chooses 9 of 8", "8 or less")),
        (("model.num_expert_groups=4", "model.num_experts_per_token=3"), ("chooses 3 of 2 experts", "2 or less")),
        (("model.num_expert_groups=3",), ("num_experts=8 is not a multiple of num_expert_groups=3", "1, 2, 4, 8")),
        (("model.num_groups_per_token=2",), ("a token chooses 2 of 1 groups", "1 or less")),
        (("model.num_dense_layers=3", "model.dense_mlp_dim=8"), ("none has experts", "2 or less")),
        (("model.num_dense_layers=1",), ("model.dense_mlp_dim: num_dense_layers=1 needs it",)),
        (("model.mlp=plain",), ("model.mlp: plain is not implemented for experts", "use gated")),
        ((*EXPERT, "parallel.experts=capacity", "moe.capacity_factor=0.05"),
         ("moe.capacity_factor=0.05 leaves an expert no row for 16 choices of a device", "use 0.063 or more")),
        ((*EXPERT, "moe.num_chunks=7"), ("moe.num_chunks: 64 tokens of a device are not divisible by 7 chunks",)),
        ((*EXPERT, "moe.max_imbalance=0.5"), ("moe.max_imbalance",)),
        ((*EXPERT, "parallel.experts=ragged"), ("the compiler for cpu-4 has no ragged all-to-all",)),
        ((*EXPERT, "target=h100-4", "parallel.experts=ragged"),
         ("the compiler for h100-4 hides fewer other collectives next to a ragged all-to-all",)),
        ((*EXPERT, "target=h100-4", "parallel.experts=hierarchical"),
         ("the devices along expert are in one node of h100-4",)),
        ((*EXPERT, "target=h100:4x1", "parallel.experts=hierarchical"),
         ("each device along expert is in another node of h100:4x1",)),
        ((*EXPERT, "target=v5e-4", "parallel.experts=hierarchical"),
         ("the devices of v5e-4 along expert are not in equal nodes", "or deduplicated")),
        ((*EXPERT, OVER_TWO, "parallel.experts=hierarchical"),
         ("the experts are split over several mesh axes, fsdp and expert",)),
        (("sharding=fsdp_tensor", "parallel.experts=gathered"), ("no mesh axis of the batch splits the experts",)),
        (("sharding=fsdp_tensor", OVER_TENSOR),
         ("has its experts over tensor, which does not split the batch", "such as expert")),
        (("sharding=fsdp", "mesh.expert=2"), ("choose sharding=fsdp_expert",)),
        ((*EXPERT, "precision.dispatch=fp9"),
         ("precision.dispatch: 'fp9' is not a type in which tokens are sent", "did you mean 'fp8'?")),
        ((*EXPERT, "precision.dispatch_gradients=mxfp8"),
         ("precision.dispatch_gradients: 'mxfp8' is not a type", "use one of fp8, fp8_e5m2, int8")),
        (("sharding=fsdp_tensor", "precision.dispatch=fp8"),
         ("precision.dispatch: every device has all experts", "mesh.expert=N")),
    ],
)  # fmt: skip
def test_what_cannot_run_is_one_clear_error(overrides, words):
    told = _problem(*overrides)
    assert told.count("error: ") == 1
    assert all(one in told for one in words), told


def test_a_dense_model_has_no_exchange_to_choose():
    with pytest.raises(ConfigError, match=r"the model has no such operation\n +fix: set parallel.experts=auto$"):
        plan_of("parallel.experts=deduplicated")


def test_a_dense_model_sends_no_tokens_in_few_bits():
    with pytest.raises(
        ConfigError, match=r"precision.dispatch: the model has no experts\n +fix: set precision.dispatch="
    ):
        plan_of("precision.dispatch=fp8")


@pytest.mark.parametrize("name", ["gathered", "padded", "deduplicated", "ragged", "capacity"])
def test_in_few_bits_what_goes_to_experts_has_half_of_the_bytes_and_a_scale_for_each_row(name):
    """Of all bytes of rows, there and back, forward and backward, two of four parts are halved."""
    overrides = (*MIXTRAL, "target=v5p-128", "mesh.fsdp=16", "mesh.expert=4", f"parallel.experts={name}")
    types = ("precision.dispatch=fp8", "precision.dispatch_gradients=fp8_e5m2")
    whole, few = (plan_as_declared(*overrides, *more).operation("experts").chosen for more in ((), types))
    before, after = (sum(each.count * each.bytes_each for each in one.collectives) for one in (whole, few))
    assert 0.74 < after / before < 0.77
    assert "tokens in fp8, gradients of results in fp8_e5m2" in few.what
    assert (few.cost is None) == (whole.cost is None)
    if few.cost and whole.cost:  # capacity has none: nothing is compared with it
        assert few.cost.value <= whole.cost.value


@pytest.fixture(scope="module")
def mixtral():
    return plan_as_declared(*MIXTRAL, "target=v5p-128", "mesh.fsdp=16", "mesh.expert=4", "overlap.flag_presets=[]")


def test_auto_takes_the_shortest_exchange_that_the_target_has(mixtral):
    """Without options the compiler overlaps none. Full remat sends rows to their experts again, and no results."""
    chosen = mixtral.operation("experts")
    costs = _costs(chosen)
    assert chosen.chosen.name == min(costs, key=lambda name: costs[name]) == "deduplicated"
    # Of a ring of 4 chips each sends 2 choices for each of 8192 tokens there and back, forward and backward, and there
    # again; empty rows of the padded one are sent too.
    row_bytes, rows = 4096 * 2, 8192 * 2
    once = mixtral.mesh.alone_seconds("all-to-all", 4 * rows * row_bytes, ("expert",))
    assert costs["ragged"] == pytest.approx(5 * once, rel=0.02)  # and weights
    assert costs["padded"] == pytest.approx(2 * 5 * once, rel=0.02)
    # Of the 28 pairs of 8 experts, 15 have none of the two on a device.
    assert costs["deduplicated"] == pytest.approx(5 * once * 4 * (13 / 28) / 2, rel=0.03)  # and choices
    on_v5e = plan_as_declared(*MIXTRAL, "target=v5e-64", "mesh.fsdp=16", "mesh.expert=4").operation("experts")
    assert on_v5e.chosen.name == "gathered"
    assert next(s for s in on_v5e.rejected if s.name == "ragged").refusal is not None


@pytest.mark.parametrize("num_devices", [4, 8, 16, 32])
def test_a_token_goes_to_as_many_devices_as_have_one_of_its_experts(num_devices):
    """By chance: 8 of 128 experts, and 2 of 8 over 4 devices."""
    for num_experts, num_chosen in ((128, 8), (8, 2)):
        if num_experts % num_devices:
            continue
        sizes = ExchangeSizes(Experts(num_experts, ("expert",), num_devices), 1, num_chosen, 1, 1)
        scores = np.random.default_rng(0).random((20_000, num_experts))
        ids = np.argpartition(scores, num_chosen, axis=1)[:, :num_chosen]
        has = [(ids // sizes.experts.num_local == device).any(1) for device in range(num_devices)]
        assert sizes.share_of_device == pytest.approx(np.mean(has), rel=0.005)


@pytest.mark.parametrize("num_best", [1, 2])
def test_a_token_that_chooses_groups_first_goes_to_fewer_devices(num_best):
    """By the model's own router: 8 of 256 experts, of 4 of 8 groups."""
    scores = jnp.asarray(np.random.default_rng(0).random((1, 20_000, 256)), jnp.float32)
    groups = ExpertGroups(8, 4)
    _, ids = route(scores, None, num_chosen=8, num_groups=groups.num, num_groups_chosen=groups.num_chosen,
                   num_best=num_best, is_normalized=True, scale=1.0)  # fmt: skip
    for num_devices in (2, 4, 8, 16, 64):
        sizes = ExchangeSizes(Experts(256, ("expert",), num_devices), 1, 8, 1, 1, groups=groups)
        has = [(np.asarray(ids)[0] // sizes.experts.num_local == device).any(1) for device in range(num_devices)]
        assert sizes.share_of_device == pytest.approx(np.mean(has), rel=0.02)


def test_a_model_says_of_which_groups_its_choices_are():
    sizes = ("model=deepseek_v3", "sharding=fsdp_expert", "target=h100-2048", "mesh.fsdp=32", "mesh.expert=64",
             "global_batch_size=4096", "sequence_length=4096", "remat=full", "moe.max_imbalance=1")  # fmt: skip
    plan = plan_as_declared(*sizes, "parallel.experts=hierarchical")
    assert plan.operation("experts").chosen.parameters.buffers.tokens_to_node == plan.batch.tokens_of_device / 2


@pytest.mark.parametrize(("target", "is_ragged"), [("v5p-128", True), ("v5e-64", False)])
def test_a_deduplicated_exchange_has_room_for_the_declared_imbalance_of_tokens(target, is_ragged):
    """Qwen 3 over 16 devices: 8 of 128 experts, 8 on each. A padded exchange has as much room for each pair."""
    overrides = ("model=qwen3_30b_a3b", "model.num_layers=2", "sharding=fsdp_expert", "mesh.fsdp=4", "mesh.expert=16",
                 "global_batch_size=128", "sequence_length=2048", "remat=full")  # fmt: skip
    plans = [
        plan_as_declared(*overrides, f"target={target}", "parallel.experts=deduplicated", f"moe.max_imbalance={most}")
        for most in ("1.5", "null")
    ]
    limited, for_any = (plan.operation("experts").chosen.parameters for plan in plans)
    share = 1 - math.comb(120, 8) / math.comb(128, 8)
    tokens = plans[0].batch.tokens_of_device * (16 if is_ragged else 1)
    assert (limited.is_ragged, for_any.is_ragged) == (is_ragged, is_ragged)
    assert (limited.buffers.tokens, for_any.buffers.tokens) == (math.ceil(1.5 * tokens * share), tokens)
    assert (limited.buffers.is_dropless, for_any.buffers.is_dropless) == (False, True)


@pytest.mark.ci
def test_estimates_and_prices_have_the_bytes_of_a_deduplicated_exchange():
    """Rows that are sent, not the places of its buffers: there, again, and back; gradients of both."""
    overrides = (*MIXTRAL, "target=v5p-128", "mesh.fsdp=16", "mesh.expert=4", "parallel.experts=deduplicated")
    plan = plan_as_declared(*overrides, "overlap.flag_presets=[]")
    found = [
        each
        for each in estimate_step(plan).communication
        if each.kind == "all-to-all" and each.origin.name == "routed, tokens to experts and back"
    ]
    tokens = 4 * 4 * 8192 * (13 / 28)  # of 4 devices, to 4
    assert sum(each.bytes for each in found) == pytest.approx(2 * 5 * tokens * 4096 * 2, rel=1e-3)


QWEN = ("model=qwen3_30b_a3b", "model.num_layers=2", "sharding=fsdp_expert", "target=h100-64", "mesh.expert=64",
        "global_batch_size=128", "sequence_length=2048", "remat=full")  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("imbalance", ["1", "1.5"])
def test_estimates_and_prices_have_the_bytes_of_both_steps(imbalance):
    """With room for all tokens in each node, they are gathered. A device sends each token to 0.67 of eight nodes; each
    device of a node has an expert of 0.12 of all tokens."""
    plan = plan_as_declared(*QWEN, "parallel.experts=hierarchical", f"moe.max_imbalance={imbalance}")
    found = dict[tuple[str, int, int], int]()
    for each in estimate_step(plan).communication:
        if each.origin.name == "routed, tokens to experts and back" and each.bytes_each > 10**8:
            assert each.groups
            key = each.kind, each.group_size, each.groups.stride
            found[key] = found.get(key, 0) + each.bytes // each.bytes_each
    tokens, share = plan.batch.tokens_of_device, 1 - math.comb(112, 8) / math.comb(128, 8)
    is_gathered = float(imbalance) * share > 1
    over = {("all-to-all", 8, 8): 2 * 5}
    if is_gathered:
        over = {("all-gather", 8, 8): 2 * 3, ("reduce-scatter", 8, 8): 2 * 2}
    assert found == {**over, ("all-to-all", 8, 1): 2 * 5}
    buffers = plan.operation("experts").chosen.parameters.buffers
    assert buffers.tokens_to_node == (None if is_gathered else math.ceil(tokens * share))
    inside = float(imbalance) * 8 * tokens * (1 - math.comb(126, 8) / math.comb(128, 8))
    assert buffers.tokens == math.ceil(inside)


def test_over_several_nodes_tokens_go_to_each_node_once_where_that_is_shortest():
    """By the prices of one node and of a group of one GPU in each node, which are mesh axes in another layout."""
    plan = plan_as_declared(*QWEN, "moe.max_imbalance=1")
    experts = plan.operation("experts")
    costs, buffers = _costs(experts), experts.chosen.parameters.buffers
    assert experts.chosen.name == min(costs, key=lambda name: costs[name]) == "hierarchical"
    apart = plan_as_declared(*QWEN, "mesh.fsdp=8", "mesh.expert=8").mesh
    sent = {
        "fsdp": (buffers.tokens_to_node, plan.batch.tokens_of_device),
        "expert": (buffers.tokens, 8 * buffers.tokens_to_node),
    }
    rows, choices = 0.0, 0.0
    for axis, (to_each, known) in sent.items():
        rows += apart.alone_seconds("all-to-all", 8 * 8 * to_each * 2048 * 2, (axis,)) or math.nan
        choices += apart.alone_seconds("all-gather", 8 * known * 8 * 4, (axis,)) or math.nan
    # Rows there, again, and back, and gradients of results; those of tokens run beside other matmuls. Experts of
    # choices and their weights, there and again.
    assert costs["hierarchical"] == pytest.approx(4 * (rows + choices), rel=1e-3)


def test_where_nearly_all_tokens_go_to_each_node_they_are_gathered():
    """Of four nodes a token has experts in 0.91. To send it to those alone would take longer, by the prices of mesh
    axes in another layout: it waits for the router."""
    four = (*QWEN, "target=h100-32", "moe.max_imbalance=1")
    plan = plan_as_declared(*four, "mesh.expert=32")
    chosen, tokens = plan.operation("experts").chosen, plan.batch.tokens_of_device
    assert (chosen.name, chosen.parameters.buffers.tokens_to_node) == ("hierarchical", None)
    apart = plan_as_declared(*four, "mesh.fsdp=4", "mesh.expert=8").mesh
    share = 1 - math.comb(96, 8) / math.comb(128, 8)
    exposed = read_compiler_traits("gpu", "h100").exposed_inputs
    gathered = apart.alone_seconds("all-gather", 4 * tokens * 2048 * 2, ("fsdp",)) or math.nan
    swapped = apart.alone_seconds("all-to-all", 4 * 4 * share * tokens * 2048 * 2, ("fsdp",)) or math.nan
    assert (3 * exposed + 1) * gathered < 4 * swapped


def _costs(plan):
    return {each.name: each.cost.value for each in (plan.chosen, *plan.rejected) if each.cost}


ASYNC = "overlap.flag_presets=[sparse_core,async_exchange]"
ON_V5P = (*MIXTRAL, "overlap=prefetch", "target=v5p-128", "mesh.fsdp=16", "mesh.expert=4")


def test_an_exchange_is_priced_by_what_nothing_hides():
    """Of two chunks, the first is sent and the last comes back beside no matmul. Gathering tokens does not wait for the
    router; no results are sent again. Parts begin more often than whole arrays."""
    plans = [plan_as_declared(*ON_V5P, "moe.num_chunks=2", *more) for more in ((ASYNC,), (ASYNC, "remat=none"))]
    mesh, tokens_bytes = plans[0].mesh, 8192 * 4096 * 2
    exchanged = mesh.alone_seconds("all-to-all", 4 * 2 * tokens_bytes, ("expert",)) or math.nan
    scattered = mesh.alone_seconds("reduce-scatter", 4 * tokens_bytes, ("expert",)) or math.nan
    for plan, num_legs in zip(plans, (4, 3), strict=True):
        costs = _costs(plan.operation("experts"))
        assert costs["ragged"] == pytest.approx(num_legs * exchanged / 2, rel=0.06)
        assert costs["gathered"] == pytest.approx(2 * scattered / 2, rel=0.06)
    assert plans[0].operation("experts").chosen.name == "gathered"
    # The SparseCores send no all-to-all: all five legs of it are waited for.
    on_cores = plan_as_declared(*ON_V5P, "overlap.flag_presets=[sparse_core]").operation("experts")
    assert _costs(on_cores)["ragged"] == pytest.approx(5 * exchanged, rel=0.03)
    assert on_cores.chosen.name == "gathered"


def test_on_gpus_gathers_of_tokens_are_waited_for():
    """Of two chunks the first one's. So few tokens go to more than one device of eight that `auto` sends each alone."""
    overrides = ("model=mixtral_8x22b", "sharding=fsdp_expert", "target=h100-64", "mesh.fsdp=8", "mesh.expert=8",
                 "global_batch_size=128", "sequence_length=4096", "moe.max_imbalance=1.25")  # fmt: skip
    share = read_compiler_traits("gpu", "h100").exposed_inputs
    for num_chunks in (1, 2):
        chunks = f"moe.num_chunks={num_chunks}"
        kept, again = (plan_as_declared(*overrides, chunks, f"remat={remat}") for remat in ("none", "full"))
        gathered = kept.mesh.alone_seconds("all-gather", 8 * 8192 // num_chunks * 6144 * 2, ("expert",)) or math.nan
        costs = [_costs(plan.operation("experts"))["gathered"] for plan in (kept, again)]
        assert costs[1] - costs[0] == pytest.approx(share * gathered, rel=0.07)  # and choices
        assert kept.operation("experts").chosen.name == "deduplicated"


def test_on_gpus_chunks_do_not_hide_exchanges_over_several_nodes():
    """They do within a node: of two chunks the first one's is waited for. Smaller arrays take longer for each byte."""
    inside, across = (
        [
            _costs(plan_as_declared(*QWEN, *mesh, f"moe.num_chunks={chunks}").operation("experts"))["gathered"]
            for chunks in (1, 2)
        ]
        for mesh in (("target=h100-8", "mesh.expert=8"), ())
    )
    assert inside[1] == pytest.approx(inside[0] / 2, rel=0.05)
    assert across[1] >= across[0]


def test_on_gpus_the_matrices_gradients_hide_those_of_tokens():
    """What a layer waits for without recomputation: tokens, results and their gradients; not the gradients of tokens,
    which the compiler for v5p does not hide."""
    sizes = ("model=mixtral_8x22b", "sharding=fsdp_expert", "mesh.fsdp=8", "mesh.expert=8", "global_batch_size=128",
             "sequence_length=4096", "moe.max_imbalance=1.25", "remat=none")  # fmt: skip
    share = read_compiler_traits("gpu", "h100").exposed_inputs
    for expected, *more in ((2 * share + 1, "target=h100-64"), (2, "target=v5p-128", ASYNC)):
        plan = plan_as_declared(*sizes, *more)
        gathered = plan.mesh.alone_seconds("all-gather", 8 * 8192 * 6144 * 2, ("expert",)) or math.nan
        assert _costs(plan.operation("experts"))["gathered"] == pytest.approx(expected * gathered, rel=0.1)


@pytest.mark.ci
def test_prices_are_near_what_compiled_schedules_leave_exposed():
    """bench/experts.jsonl: two layers with experts in each row. Padded: its empty rows are priced as if they were sent
    like the others."""
    rows = [
        json.loads(line) for line in (Path(__file__).parents[3] / "bench" / "experts.jsonl").read_text().splitlines()
    ]
    compiled = {row["name"]: row["exposed_over"]["expert"] / 2 for row in rows if "padded" not in row["name"]}
    priced = {}
    for row in rows:
        plan = plan_as_declared(*row["overrides"]).operation("experts")
        priced[row["name"]] = _costs(plan)[plan.chosen.name]
    assert {name: priced[name] for name in compiled} == pytest.approx(compiled, rel=0.5)
    of_mixtral = ("gathered, 2 chunks", "ragged, 2 chunks", "ragged")
    assert sorted(of_mixtral, key=lambda name: priced[name]) == list(of_mixtral)


def test_buffers_have_the_declared_room_and_without_one_room_for_all(mixtral):
    buffers = mixtral.operation("experts").chosen.parameters.buffers
    assert buffers.rows == 2 * 8192 * 2
    assert not buffers.is_dropless
    spec = mixtral.spec.model_copy(update={"moe": mixtral.spec.moe.model_copy(update={"max_imbalance": None})})
    for_all = plan_run(spec).operation("experts").chosen.parameters.buffers
    assert for_all.rows == 4 * 8192 * 2
    assert for_all.is_dropless


@pytest.mark.ci
def test_the_estimate_counts_filled_rows_once_each_and_larger_buffers_as_memory(mixtral):
    """With full remat a step runs each layer's matmuls four times forward, but for the last one of the experts, which
    runs three times: as many FLOPs as the model has, times 4/3, without it. An imbalance of 4 takes twice the buffers
    of one of 2, and no more matmuls."""
    roomy = mixtral.spec.model_copy(update={"moe": mixtral.spec.moe.model_copy(update={"max_imbalance": 4.0})})
    estimates = [estimate_step(plan) for plan in (mixtral, plan_run(roomy))]
    flops = [next(part.flops for part in each.roofline if part.name.startswith("layers")) for each in estimates]
    assert flops[0] == pytest.approx(flops[1], rel=1e-3)
    model = count_model_flops(mixtral.model, mixtral.spec, mixtral.ops).per_step
    assert model is not None
    tokens = mixtral.spec.tokens_per_step
    head = 6 * 32000 * 4096 * tokens
    attention = 2 * 3 * 4 * 2048 * 4096 * tokens
    # A tile more for each of two experts: of 128 rows in five kernels forward, and of 256 in six backward.
    of_row = mixtral.model.stacks[0].num_layers * 2 * 4096 * 14336
    tiles = 2 * (5 * 128 + 6 * 256) * of_row
    last = 2 * 8192 * of_row
    assert flops[0] == pytest.approx((model - head - attention) / 64 * 4 / 3 - last + tiles, rel=0.005)
    memory = [each.memory.peak_bytes for each in estimates]
    assert memory[1] > memory[0] + 2 * 8192 * 2 * 14336 * 2  # the hidden rows of a layer, at least
    assert not estimates[0].unknown


@pytest.mark.ci
def test_exchanges_are_told_by_the_site_of_their_experts(mixtral):
    sources = {each.origin.name for each in estimate_step(mixtral).communication if each.mesh_axes == ("expert",)}
    assert sources == {"routed, tokens to experts and back"}


def _grouped_matmul(chip: Chip, ragged: int = 128) -> Compute:
    """Returns the compute of 1.07 TFLOP of `ragged_dot` over 1,024 rows of four experts, of which half are filled.
    ragged: the rows of a tile."""
    scope = experts_scope("routed", 0.5, tile=LARGEST_TILE._replace(ragged=ragged))
    assert OperationName(f"jit(f)/{scope}/dot").fact("filled") == "0.5000"
    line = (
        "HloModule m\n\nENTRY %e (w: bf16[4,512,1024], x: bf16[1024,512]) -> bf16[1024,1024] {\n"
        "  %w = bf16[4,512,1024]{2,1,0} parameter(0)\n  %x = bf16[1024,512]{1,0} parameter(1)\n"
        '  ROOT %ragged-dot-none = bf16[1024,1024]{1,0} custom-call(%x, %w), custom_call_target="tpu_custom_call", '
        f'metadata={{op_name="jit(f)/{scope}/ragged-dot-none"}}, backend_config={{"custom_call_config":'
        '{"cost_estimate":{"flops":"1073741824000","bytes_accessed":"1"}}}\n}\n'
    )
    module = parse_module(line)
    (entry,) = module.computations.values()
    compute = price_instruction(entry.instructions[-1], entry, module, chip, OPERATIONS)
    assert compute is not None
    return compute


COMPUTED = {tile: (0.5 * 1024 + 4 * tile) / 1024 for tile in (128, 256)}  # half of the rows, a tile more of each expert


def test_a_grouped_kernel_is_priced_by_the_rows_that_are_filled():
    """And by the tiles of XLA's own kernel, in which four groups meet."""
    for tile, computed in COMPUTED.items():
        compute = _grouped_matmul(Chip("tpu", 1e9, {"bfloat16": 1e12}, 1e15), tile)
        assert compute.kind == "matmul"
        assert compute.seconds == pytest.approx(computed * 1.073741824 / grouped_kernels()["ragged_dot"].share)


@pytest.mark.parametrize("name", ["v5p-8", "tpu7x-8"])
def test_estimates_and_compiled_programs_price_grouped_matmuls_by_one_function(name, monkeypatch):
    target, prices = target_of(name), []
    for share in (0.6, 0.15):
        kernels = {"ragged_dot": GroupedKernel(share=share, source=FigureSource(measured="a test"))}
        monkeypatch.setattr(kernel_rates, "grouped_kernels", lambda kernels=kernels: kernels)
        rate = target.kernel_rate("ragged_dot")
        assert rate is not None
        prices.append(COMPUTED[128] * 1.073741824e12 / rate)
        assert _grouped_matmul(chip_of(target)).seconds == pytest.approx(prices[-1])
    assert prices[1] == pytest.approx(4 * prices[0])


def test_a_tile_in_which_groups_meet_is_computed_for_each_of_them():
    """Sixteen groups of about 1,000 rows, which fill half of a buffer: what megablox computes, tile by tile."""
    ends = np.cumsum(np.random.default_rng(0).integers(800, 1200, 16))
    starts = np.concatenate([[0], ends[:-1]])
    computed = 512 * sum(-(-end // 512) - start // 512 for start, end in zip(starts, ends, strict=True))
    rows = 2 * 512 * -(-int(ends[-1]) // 512)
    call = _megablox(rows, 16, 256, 128)
    cost = grouped_cost(call, ends[-1] / rows)
    assert cost is not None
    assert cost.grouped == "megablox"
    assert cost.flops == pytest.approx(2 * computed * 256 * 128, rel=0.03)
    assert cost.num_bytes == pytest.approx(2 * (ends[-1] * (256 + 128) + 16 * 256 * 128), rel=1e-6)


def _megablox(rows: int, groups: int, width: int, columns: int) -> KernelCall:
    return KernelCall(
        kernel="tpu_custom_call gmm",
        name=OperationName(""),
        operands=(KernelArray((rows, width), "bfloat16"), KernelArray((groups, width, columns), "bfloat16")),
        results=(KernelArray((rows, columns), "bfloat16"),),
        stated=KernelCost(2.0 * rows * width * columns),
        is_pallas=True,
    )


@pytest.mark.parametrize("size", [24, 256, 768, 1024, 1408, 1536, 2048, 2880, 7168, 14336])
def test_tiles_are_as_wide_as_leaves_least_of_them_empty(size):
    """Of all widths that the unit of 128 lanes divides, and that are neither above 1,024 nor below a half of it where a
    matrix is wider. What a tile has beyond the matrix is computed, and priced."""
    widths = range(512 if size > 1024 else 128, 1025, 128)
    covered = {width: -(-size // width) * width for width in widths}
    width = tile_width(size)
    assert covered[width] == min(covered.values())
    assert width == max(w for w in widths if covered[w] == covered[width] and w < size + 128)
    cost, narrow = (grouped_cost(_megablox(4096, 4, 256, columns), 1.0) for columns in (size, 128))
    assert cost is not None
    assert narrow is not None
    assert cost.flops == pytest.approx(narrow.flops * covered[width] / 128)


@pytest.mark.parametrize(("target", "group", "rows"), [
    ("v5p-16", 1000, 256), ("v5p-16", 8000, 256), ("v6e-16", 400, 256), ("v6e-16", 4000, 512), ("v4-16", 400, 512),
])  # fmt: skip
def test_a_tile_of_rows_is_the_one_that_takes_least(target, group, rows):
    """By counting the tiles of random groups. Of v4 no second tile was measured."""
    times = grouped_kernels()["megablox"].row_tiles.get(target.partition("-")[0], {512: 1.0})
    ends = np.cumsum(np.random.default_rng(0).integers(int(0.8 * group), int(1.2 * group), 64))
    starts = np.concatenate([[0], ends[:-1]])
    taken = {size: time * size * np.sum(-(-ends // size) - starts // size) for size, time in times.items()}
    assert min(taken, key=taken.__getitem__) == rows
    tiles = [RowTile(*each) for each in times.items()]
    best = best_tile(tiles, int(ends[-1]), 64)
    assert best == RowTile(rows, times[rows])
    buffer = 512 * -(-int(ends[-1]) // 512)
    cost = grouped_cost(_megablox(buffer, 64, 256, 128), ends[-1] / buffer, best)
    assert cost is not None
    assert cost.flops == pytest.approx(2 * taken[rows] * 256 * 128, rel=0.03)


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize(
    ("target", "tile"),
    [("v5p-16", RowTile(256, 1.0)), ("v4-16", LARGEST_TILE), ("v6e-16", RowTile(256, 1.3, ragged=256))],
)
def test_a_plan_names_the_tile_of_rows_in_the_scope_of_its_kernels(target, tile):
    plan = plan_of(*MOE, f"target={target}", "precision=bfloat16")
    kernels = [each for each in read_step(plan).walk() if each.rated_by in ("megablox", "ragged_dot")]
    assert {OperationName(each.scope).row_tile for each in kernels} == {tile}


def test_a_declared_tile_of_rows_is_that_of_all_kernels_for_tpus():
    plan = plan_of(*MOE, "target=v5p-16", "precision=bfloat16", "moe.tile_rows=128")
    kernels = [each for each in read_step(plan).walk() if each.rated_by in ("megablox", "ragged_dot")]
    assert {each.rated_by for each in kernels} == {"megablox"}
    assert {OperationName(each.scope).row_tile for each in kernels} == {RowTile(128, 1.0)}
    with pytest.raises(ConfigError, match=r"moe.tile_rows: 128 rows are for megablox"):
        plan_of(*MOE, "target=h100-8", "precision=bfloat16", "model.head_dim=8", "moe.tile_rows=128")


def test_a_gradient_of_matrices_costs_as_much_in_an_estimate_as_in_the_compiled_program():
    """A compiled kernel for Triton has shapes alone. The traced one declares the bytes of all rows besides, which the
    rows that are filled replace: a quarter of both arrays, read once, and the matrices."""
    rows = 4096
    places = KernelArray((16,), "int32")
    operands = places, places, KernelArray((rows, 64), "bfloat16"), KernelArray((rows, 32), "bfloat16")
    traced = KernelCall(
        kernel="pallas_call grouped_matmul_of_rows",
        name=OperationName(""),
        operands=operands,
        results=(KernelArray((16, 64, 32), "bfloat16"),),
        stated=KernelCost(2.0 * rows * 64 * 32, num_bytes=10**9),
        is_pallas=True,
    )
    compiled = replace(traced, kernel="__gpu$xla.gpu.triton", stated=None)
    estimated, priced = grouped_cost(traced, 0.25), grouped_cost(compiled, 0.25)
    assert estimated == priced
    assert priced is not None
    assert priced.num_bytes == 2 * (1024 * (64 + 32) + 16 * 64 * 32) + 2 * 4 * 16


def test_a_gather_reads_the_rows_that_are_filled():
    """Two devices have half of the experts each, and buffers for all tokens: half of the rows have one. Each gathered
    row is written, every second is read."""
    plan = plan_of(*MOE, *EXPERT, "parallel.experts=gathered")
    step = price_regions(read_step(plan), plan.target.compiler)
    rows = [(region, one) for region, one in step.each() if f"{FILLED}=0.5" in one.operation.scope]
    gathers = [(region.program.sizes[one.operation.outputs[0]], one.hbm_bytes)
               for region, one in rows if one.operation.name == "gather" and one.hbm_bytes]  # fmt: skip
    assert gathers
    assert all(moved == 1.5 * made for made, moved in gathers)


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize(("target", "kernels"), [("v5p-16", {"ragged_dot", "megablox"}), ("h100-8", {"triton"})])
def test_estimates_price_grouped_matmuls_by_the_kernels_that_run(target, kernels):
    plan = plan_of(*MOE, f"target={target}", "precision=bfloat16", "model.head_dim=8")
    assert {each.rated_by for each in read_step(plan).walk() if isinstance(each.rated_by, str)} == kernels


def test_expert_is_an_axis_that_a_search_varies():
    spec = plan_of(*MOE, *EXPERT).spec
    assert {"fsdp", "expert"} <= set(mesh_axes(spec))
    assert math.prod(size for _, size in spec.mesh) == 4
