"""Memory and bounds of a step without XLA, against sums by hand and published formulas."""

from collections import Counter
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from conftest import LINEAR_STACK, WHOLE_STREAM, plan_of
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate import estimate
from meshloom.compiler.estimate.communication import PlannedCollective
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.estimate.estimated_step import read_step
from meshloom.compiler.estimate.liveness import find_peak
from meshloom.compiler.estimate.regions import matmul_types, price_regions
from meshloom.compiler.jaxpr.fusion import fuse, stacked_bytes, traffic
from meshloom.compiler.jaxpr.read_jaxpr import read_jaxpr
from meshloom.compiler.spec.compiler_traits import CompilerTraits
from meshloom.compiler.xla.programs import lower
from meshloom.models.family_configs import DecoderConfig

ONE_DEVICE = "target=cpu-1"


@cache
def estimate_of(*overrides):
    """The estimate of a small run; traced once for all tests."""
    return estimate_step(plan_of(*overrides))


def _program(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return read_jaxpr(jax.make_jaxpr(function)(*arguments).jaxpr, [((),) * len(shape) for shape in shapes], {})


def _peak(program):
    return find_peak(price_regions(program, CompilerTraits()))


def test_a_step_that_multiplies_in_eight_bits_has_the_range_of_low_precision(monkeypatch):
    """As a model of one's own may, besides `precision=fp8`."""

    def narrow(x):
        rounded = x.astype(jnp.float8_e4m3fn)
        return jnp.matmul(rounded, rounded, preferred_element_type=jnp.float32)

    found = matmul_types(price_regions(_program(narrow, (8, 8)), CompilerTraits()))
    assert found == {"float8_e4m3fn"}
    monkeypatch.setattr(estimate, "matmul_types", lambda _: found)
    basis = estimate_step(plan_of("target=h100-8", "sharding=fsdp")).figures.range_basis
    assert isinstance(basis, str)
    assert basis.startswith("dense and low precision, ")


def test_arrays_without_entries_are_read():
    """No product of their sizes tells their dimensions apart."""
    program = _program(lambda x: x.reshape(0), (1, 1, 0))
    assert program.sizes[program.outputs[0]] == 0


def test_gradients_of_a_split_table_lie_as_the_table():
    """As XLA's partitioner has them: a device adds up the gradients of the rows that it holds."""

    def gradient(table, rows):
        return jax.vjp(lambda table: jnp.tanh(table[rows]), table)[1](jnp.ones((8, 16)))[0]

    shapes = (jax.ShapeDtypeStruct((64, 16), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32))
    layouts = [(("tensor",), ()), ((),)]
    program = read_jaxpr(jax.make_jaxpr(gradient)(*shapes).jaxpr, layouts, {"tensor": 4})
    assert program.sizes[program.outputs[0]] == 64 * 16 * 4 // 4
    assert {program.sizes[i] for one in program.operations if one.name == "scatter-add" for i in one.inputs[:1]} == {
        64 * 16 * 4 // 4
    }


def test_the_gradient_of_what_is_not_read_is_added_without_a_pass():
    """JAX makes zeros of it, whose addition compilers remove."""

    def accumulated(total, unread, x):
        of_unread, _ = jax.vjp(lambda unread, x: jnp.tanh(x), unread, x)[1](x)
        return total + of_unread

    program = _program(accumulated, (64, 16), (64, 16), (8,))
    assert program.outputs == program.inputs[:1]
    assert _written(program) == []


def _written(program):
    """Bytes of each array that the fused program writes, in order."""
    return [[program.sizes[i] for i in step.writes] for step in fuse(program, is_loop=False).steps]


def test_a_chain_of_pointwise_operations_is_one_array():
    assert _written(_program(lambda x: jnp.tanh(jnp.exp(x) * 2) + x, (8, 16))) == [[512]]


def test_what_a_matmul_reads_is_an_array_and_its_result_is_written_behind_what_follows():
    program = _program(lambda x, w: jnp.tanh(jnp.exp(x) @ w).astype(jnp.bfloat16), (8, 16), (16, 32))
    assert _written(program) == [[8 * 16 * 4], [8 * 32 * 2]]


def test_a_sum_is_an_array_where_its_readers_would_move_more_bytes_without_one():
    """Three readers of a sum of four arrays: 12 arrays read and 3 written, or 4 + 3 read and 1 + 3 written. Two readers
    of a sum of two: 4 + 2, or 2 + 2 + 1 + 2. A sum that follows a matmul is written in place of the product."""
    array = 8 * 16 * 4

    def read_thrice(x):
        return jnp.exp(x), jnp.tanh(x), jnp.sin(x)

    assert _written(_program(lambda a, b, c, d: read_thrice(a + b + c + d), *[(8, 16)] * 4)) == [[array]] * 4
    assert _written(_program(lambda a, b: read_thrice(a + b)[:2], *[(8, 16)] * 2)) == [[array]] * 2
    program = _program(lambda x, w, a, b: read_thrice(x @ w + a + b), (8, 16), (16, 16), (8, 16), (8, 16))
    steps = fuse(program, is_loop=False).steps
    assert [(step.operation.kind, len(step.reads)) for step in steps] == [("matmul", 4), *[("pointwise", 1)] * 3]


def test_readers_of_parts_of_a_sum_read_no_more_than_their_parts():
    """Both halves are read twice, and whoever makes a half again reads the halves of three arrays."""

    def turned(a, b, c):
        left, right = jnp.split(a + b + c, 2, axis=1)
        return jnp.tanh(left) * right, jnp.exp(left) - right

    assert _written(_program(turned, *[(8, 16)] * 3)) == [[8 * 8 * 4]] * 2


@pytest.mark.ci
def test_a_group_of_layers_adds_the_gradient_of_its_input_layer_by_layer():
    """Gemma 3 12B of 32k tokens has run on v6e-256, a sequence on each chip, with the input of each layer saved."""
    declared = ("model=gemma3_12b", "target=v6e-256", "sharding=fsdp", "sequence_length=32768", "global_batch_size=256",
                "remat=full", "data=synthetic")  # fmt: skip
    plan = read_spec(Request(declared), then=plan_run)
    limit = plan.target.hbm_bytes_per_device
    assert limit
    assert estimate_step(plan).memory.peak_bytes < limit


def _moved(function, *shapes, into_matmuls):
    """Bytes that cross the memory in each step of the fused program."""
    program = _program(function, *shapes)
    steps = traffic(fuse(program, is_loop=False), into_matmuls=into_matmuls)
    return [sum(program.sizes[i] for i in moved) for _, moved in steps]


def test_what_only_matmuls_read_is_computed_inside_of_them():
    """gate(x) up(x) down, as in an MLP: the product of two arrays is read by one matmul, which reads both instead."""
    x, square = 8 * 16 * 4, 16 * 16 * 4

    def product(x, w):
        return (jnp.tanh(x) * (x + 1)) @ w

    assert _moved(product, (8, 16), (16, 16), into_matmuls=False) == [2 * x, 2 * x + square]
    assert _moved(product, (8, 16), (16, 16), into_matmuls=True) == [0, 2 * x + square]

    def also_given_back(x, w):
        y = jnp.tanh(x)
        return y @ w, y

    both = [_moved(also_given_back, (8, 16), (16, 16), into_matmuls=into) for into in (False, True)]
    assert both[0] == both[1] == [2 * x, 2 * x + square], "what the program returns is written all the same"


@pytest.mark.parametrize("after_matmuls", [True, False])
def test_a_matmuls_result_is_written_and_read_again_where_what_follows_is_no_part_of_it(after_matmuls):
    """The end of the chain is made of the result and of another array."""
    program = _program(lambda x, w, y: jnp.tanh(x @ w) * y, (8, 16), (16, 16), (8, 16))
    x, square = 8 * 16 * 4, 16 * 16 * 4
    (step,) = price_regions(program, CompilerTraits(fuses_after_matmuls=after_matmuls)).steps
    matmul, behind = (3 * x + square, 0) if after_matmuls else (2 * x + square, 3 * x)
    assert sum(program.sizes[i] for i in step.arrays) == matmul
    assert sum(program.sizes[i] for i in step.behind) == behind
    assert step.hbm_bytes == matmul + behind


def test_rows_are_gathered_inside_of_what_reads_them_where_the_compiler_does_so():
    """Eight rows of 16 of a table: read and written, and read again by what doubles them; or read by that alone."""
    program = _program(lambda table, rows: table[rows.astype(jnp.int32)] * 2, (64, 16), (8,))
    rows = 8 * 16 * 4

    def moved(*, fuses_gathers):
        steps = traffic(fuse(program, is_loop=False), into_matmuls=False, fuses_gathers=fuses_gathers)
        names = [step.operation.name for step, _ in steps]
        gathered = names.index("gather")
        return [sum(program.sizes[i] for i in each) for _, each in steps[gathered:]]

    assert moved(fuses_gathers=False) == [2 * rows, 2 * rows]
    assert moved(fuses_gathers=True) == [0, 2 * rows]


def test_a_trip_copies_what_it_stacks_and_what_it_takes_from_a_stack():
    """Carried: 64 bytes, not copied here. Taken from a stack: 32 of four trips; stacked: 64. Each read and written."""

    def program(x, ys):
        return jax.lax.scan(lambda x, y: (x + jnp.sum(y), jnp.tanh(x)), x, ys)

    read = _program(program, (16,), (4, 8))
    (loop,) = (each for each in read.operations if each.bodies)
    assert sorted(stacked_bytes(loop, read)) == [0, 2 * 32, 2 * 64]


def test_a_sum_needs_no_array_of_its_terms():
    assert _written(_program(lambda x: jnp.sum(jnp.square(x)), (8, 16))) == [[4]]


def test_the_peak_of_two_matmuls():
    """The first result and the second are there at once; the third takes the place of the first."""
    peak = _peak(_program(lambda x, w: jnp.sum(x @ w @ w @ w), (64, 64), (64, 64)))
    assert peak.total == 2 * 64 * 64 * 4


def test_a_loop_counts_its_bodys_peak_once_and_what_it_stacks_in_all():
    def program(x, w):
        x, rows = jax.lax.scan(lambda x, _: (x @ w, x @ w @ w), x, None, length=5)
        return jnp.sum(rows @ w) + jnp.sum(x @ w)

    square = 64 * 64 * 4
    peak = _peak(_program(program, (64, 64), (64, 64)))
    assert peak.total == (5 + 5) * square  # rows, and rows @ w; the last x is where the first one was


def test_a_row_is_written_where_the_stack_lies():
    def program(w):
        def trip(carry, index):
            x, rows = carry
            x = x @ w
            return (x, jax.lax.dynamic_update_index_in_dim(rows, x, index, 0)), None

        return jnp.sum(jax.lax.scan(trip, (w @ w, jnp.zeros((5, 64, 64))), jnp.arange(5))[0][1])

    square = 64 * 64 * 4
    assert _peak(_program(program, (64, 64))).total == (5 + 2) * square  # rows, and x before and after a matmul


def test_partial_sums_are_joined_and_summed_into_the_shards_that_are_wanted():
    """Two matmuls of a split dimension, added: one reduce-scatter where the sum is wanted in shards, one all-reduce
    where it is not; one for each matmul, of all of it, where the compiler joins nothing."""
    mesh = jax.sharding.AbstractMesh((4,), ("tensor",))

    def crossed(wanted, *, joins_sums):
        def program(x, v, w):
            total = (x @ v).reshape(2, 8, 16) + (x @ w).reshape(2, 8, 16)
            return jax.lax.with_sharding_constraint(total, jax.sharding.NamedSharding(mesh, jax.P(*wanted))) * 2

        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 32), (32, 16), (32, 16))]
        layouts = [((), ("tensor",)), (("tensor",), ()), (("tensor",), ())]
        jaxpr = jax.make_jaxpr(program)(*shapes).jaxpr
        read = read_jaxpr(jaxpr, layouts, {"tensor": 4}, joins_sums=joins_sums)
        return [(one.collective.kind, one.collective.bytes) for one in read.operations if one.collective], read

    whole, shards = (None, None, None), (None, "tensor", None)
    num_bytes = 2 * 8 * 16 * 4
    assert crossed(shards, joins_sums=True)[0] == [("reduce-scatter", num_bytes)]
    assert crossed(whole, joins_sums=True)[0] == [("all-reduce", num_bytes)]
    assert crossed(shards, joins_sums=False)[0] == [("all-reduce", num_bytes)] * 2
    for joins_sums in (True, False):
        read = crossed(shards, joins_sums=joins_sums)[1]
        assert [read.sizes[i] for i in read.outputs] == [num_bytes // 4]


@pytest.mark.parametrize("platform", ["v5p-16", "cpu-8"])
def test_blocks_gather_and_scatter_the_residual_stream(platform):
    """What remat=full runs of a layer: forward two gathers and two sums, the same again but the last sum, and backward
    two of each; on accelerators the sums are joined and scattered. Megatron's g and its conjugate, arXiv:2205.05198."""
    plan = plan_of(f"target={platform}", "sharding=fsdp_tensor", "mesh.tensor=2", "remat=full", "sequence_length=128",
                   "parallel.attention=xla")  # fmt: skip
    counts = Counter()
    for one in estimate_step(plan).communication:
        if one.mesh_axes == ("tensor",) and _is_of_layers(one):
            counts[one.kind] += one.count
    sums = {"all-reduce": 3 * (2 + 1 + 5)} if platform == "cpu-8" else {"reduce-scatter": 3 * (2 + 1 + 2)}
    assert counts == {"all-gather": 3 * 6} | sums


def _is_of_layers(one: PlannedCollective) -> bool:
    """Returns True for what moves a layer's activations, or their gradients."""
    return one.origin.name.removeprefix("sum of ").startswith(("attention", "mlp", "queries", "keys", "values"))


def test_a_kept_sum_over_devices_is_kept_in_its_shards():
    """save_dots over tensor=2 keeps a layer's matmuls by half: heads, the hidden layer, and of the attention's output
    the half of the tokens that the residual stream has here. Nothing is added up whole to be kept."""
    plan = plan_of("target=v5p-16", "sharding=fsdp_tensor", "mesh.tensor=2", "remat=save_dots", "sequence_length=128",
                   "parallel.attention=xla", "precision=bfloat16")  # fmt: skip
    config, estimate = plan.spec.model, estimate_step(plan)
    assert isinstance(config, DecoderConfig)
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    width = config.embed_dim + heads + config.embed_dim + 2 * config.mlp_dim  # the layer's input, and what is made
    tokens = 16 // 4 * 128
    assert estimate.memory.activations == config.num_layers * 2 * tokens * width // 2
    over_tensor = [
        one for one in estimate.communication if one.mesh_axes == ("tensor",) and "norm" not in one.origin.name
    ]
    assert {one.kind for one in over_tensor if _is_of_layers(one)} == {"all-gather", "reduce-scatter"}


def test_linear_stack_by_hand():
    """Float32, one device, AdamW, remat=full: at the last layer's backward pass there are the gradients of the stack
    and of the head, the inputs of the layers, the gradient of the residual stream twice (read and written), and the
    gradient of one matrix."""
    plan = plan_of(ONE_DEVICE, *LINEAR_STACK, "remat=full", "model.embed_dim=512", "model.vocab_size=64")
    layers, embed, vocab, tokens = 3, 512, 64, 16 * 16
    memory = estimate_step(plan).memory
    assert memory.state_bytes == 3 * 4 * (layers * embed**2 + 2 * vocab * embed) + 3 * 4
    assert memory.activations == 4 * layers * tokens * embed
    assert memory.gradients >= 4 * layers * embed**2
    stream = 4 * tokens * embed
    beside = memory.peak_bytes - memory.state_bytes - memory.batch_bytes
    assert beside - 4 * layers * embed**2 - memory.activations <= 4 * vocab * embed + 3 * stream


@pytest.mark.parametrize("batch", [16, pytest.param(32, marks=pytest.mark.ci)])
def test_activations_of_a_plain_decoder_layer_by_the_published_formula(batch):
    """Korthikanti et al. 2022, arXiv:2205.05198, section 4, of matmul results alone, in 16 bits: s b h each for a
    layer's input, queries, keys, values and attention's output, and 4 s b h for the MLP's, times 2 bytes."""
    plan = plan_of(
        ONE_DEVICE, "remat=save_dots", "precision=bfloat16", f"global_batch_size={batch}", "model.mlp=plain",
        "model.num_kv_heads=16", "model.head_dim=2", "model.mlp_dim=128",
    )  # fmt: skip
    model = plan.spec.model
    assert isinstance(model, DecoderConfig)
    per_layer = 2 * plan.spec.tokens_per_step * model.embed_dim * (1 + 3 + 1 + 4)
    assert estimate_step(plan).memory.activations == model.num_layers * per_layer


def test_policies_that_keep_less_take_less():
    kept = [estimate_of(ONE_DEVICE, f"remat={policy}").memory for policy in
            ("full", "save_names", "save_dots", "none")]  # fmt: skip
    assert [m.activations for m in kept] == sorted(m.activations for m in kept)
    assert len({m.activations for m in kept}) == 4
    assert kept[0].peak_bytes < kept[-1].peak_bytes


def test_offloaded_activations_are_not_on_the_device():
    offload, full = (estimate_of(ONE_DEVICE, f"remat={policy}").memory for policy in ("offload", "full"))
    assert offload.activations == full.activations


def test_memory_grows_by_the_same_with_each_layer():
    peaks = [estimate_of(ONE_DEVICE, "remat=none", f"model.num_layers={n}").memory.peak_bytes
             for n in (3, 5, 7)]  # fmt: skip
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0] > 0


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize(
    ("layout", "stream_shards"),
    [
        (("sharding=fsdp_tensor",), 8),
        (WHOLE_STREAM, 4),
        pytest.param(("sharding=fsdp",), 8, marks=pytest.mark.ci),
    ],
)
def test_activations_are_divided_by_the_axes_that_split_them(layout, stream_shards):
    """Eight devices: the batch in eight; or in four, and the MLP's hidden layer in two, and so the residual stream."""
    names = ("remat=save_names", "remat.names=[hidden]")
    one = estimate_of(ONE_DEVICE, *names).memory.activations
    stream = 4 * 3 * 16 * 16 * 32  # the layers' inputs
    hidden = one - stream
    split = estimate_of(*layout, *names).memory.activations
    assert split == stream // stream_shards + hidden // 8


# Not the length of the residual stream is split over tensor, but what matmuls sum along: they gather it first
SPLIT_STREAM = (
    "sharding=fsdp_tensor",
    "sharding.activations=[{logical: [batch], mesh: [replica, data, fsdp]}, "
    "{logical: [vocab, mlp, heads, kv_heads, embed], mesh: [tensor]}, "
    "{logical: [length, sequence_parallel_length, head_dim], mesh: []}]",
)


@pytest.mark.parametrize(
    "overrides",
    [
        ("sharding=fsdp_tensor",),
        SPLIT_STREAM,
        *(pytest.param((f"sharding={name}",), marks=pytest.mark.ci) for name in ("ddp", "fsdp")),
    ],
)
def test_flops_of_all_parts_are_the_models(overrides):
    plan = plan_of(*overrides, "remat=none")
    parts = estimate_step(plan).roofline
    assert [part.name for part in parts] == ["embed", "layers (x3)", "attention", "head", "optimizer"]
    assert sum(part.flops or 0 for part in parts) * plan.mesh.num_devices == plan.model_flops_per_step


def test_flops_of_remat_are_run_and_not_the_models():
    flops = [sum(part.flops or 0 for part in estimate_of(ONE_DEVICE, f"remat={policy}").roofline)
             for policy in ("none", "save_dots", "full")]  # fmt: skip
    assert flops == sorted(set(flops))
    assert flops[0] == plan_of(ONE_DEVICE).model_flops_per_step


def test_the_optimizer_reads_and_writes_each_array_once():
    """AdamW without clipping: parameter, gradient and two moments in, three of them out: 7 float32 each, and the
    gradient's own norm is of the same read."""
    plan = plan_of(ONE_DEVICE, *LINEAR_STACK, "optimizer.max_grad_norm=null")
    optimizer = estimate_step(plan).roofline[-1]
    assert isinstance(optimizer.hbm_bytes, int)
    assert 28 * plan.num_parameters <= optimizer.hbm_bytes < 28.5 * plan.num_parameters + 1000


def test_link_bytes_of_fully_sharded_layers():
    """A layer's weights cross three times, in float32: gathered forward and backward, scattered backward."""
    plan = plan_of("sharding=fsdp", *LINEAR_STACK)
    layers = next(part for part in estimate_step(plan).roofline if part.name.startswith("layers"))
    assert layers.link_bytes == 3 * 3 * (4 * 32 * 32) * 7 // 8


def test_bounds_by_the_targets_figures():
    overrides = ("target=v5e-8", "sharding=ddp", "sequence_length=128", "remat=full", "precision=bfloat16")
    estimate = estimate_step(plan_of(*overrides))
    chip = plan_of(*overrides).target.chip
    assert chip is not None
    for part in estimate.roofline:
        assert isinstance(part.hbm_bytes, int)
        assert isinstance(part.flops, int)
        assert part.hbm_seconds == part.hbm_bytes / chip.hbm_bytes_per_second
        assert part.flops_seconds == pytest.approx(part.flops / 197e12, rel=1e-12)  # by types, which are added
    assert estimate.figures.fits is True
    attention = next(part for part in estimate.roofline if part.name == "attention")
    assert attention.bound in ("flops", "hbm")


def test_the_peak_has_the_state_and_the_batch():
    """AdamW in float32 takes 12 bytes of each parameter; a token takes 4 as an input and 4 as a target."""
    plan = plan_of("target=cpu-1")
    memory = estimate_step(plan).memory
    moving = (memory.working_parameters + memory.gathered_weights + memory.gradients + memory.activations
              + memory.temporaries)  # fmt: skip
    counts = 16  # of steps, a few bytes
    assert memory.peak_bytes - moving == pytest.approx(12 * plan.num_parameters + 8 * 16 * 16, abs=counts)


def test_it_does_not_fit_where_the_limit_is_below():
    huge = ("target=v5e-8", "model.embed_dim=65536", "model.mlp_dim=65536", "remat=full")
    figures = estimate_step(plan_of(*huge)).figures
    assert figures.fits is False
    assert figures.limit_bytes
    assert figures.peak_bytes
    assert figures.peak_bytes > figures.limit_bytes


@pytest.mark.tpu
@pytest.mark.release
def test_the_peak_is_near_xlas_own():
    pytest.importorskip("libtpu", reason="pip install -e '.[tpu]'")
    # Large enough that the 128 MiB of vector memory, where XLA keeps arrays that fit, are little beside it.
    large = ("model.num_layers=8", "model.embed_dim=4096", "sequence_length=8192", "precision=bfloat16")
    plan = plan_of("target=v5e-4", *LINEAR_STACK, "remat=full", *large)
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    compiled = lower(plan, plan.mesh.of_devices(topology.devices))["train"].compile()
    assert estimate_step(plan).memory.peak_bytes == pytest.approx(
        compiled.memory_analysis().peak_memory_in_bytes, rel=0.1
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer=muon", "precision=float16", "data.isolate_documents=true"),
        *(
            pytest.param((one,), marks=pytest.mark.ci)
            for one in ("optimizer=muon", "optimizer=adafactor", "precision=float16", "data.isolate_documents=true")
        ),
    ],
)
def test_every_optimizer_and_precision_is_read(overrides):
    assert read_step(plan_of("sharding=fsdp", *overrides)).operations


@pytest.mark.parametrize(("sharding", "split"), [("fsdp", 1), ("fsdp_tensor", 2)])
def test_the_plan_says_what_weights_a_layer_ahead_take(sharding, split):
    """A layer's matrices, whole but for what tensor parallelism splits; norms are gathered too, and not split by it."""
    plan = plan_of(f"sharding={sharding}", "overlap=prefetch", "overlap.layers.prefetch=2")
    config = plan.spec.model
    assert isinstance(config, DecoderConfig)
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = config.embed_dim * (2 * heads + 2 * kv + 3 * config.mlp_dim)
    norms = 2 * config.embed_dim
    assert plan.memory.prefetched_weights == 2 * 4 * (matrices // split + norms)  # two layers, float32
    assert plan_of(f"sharding={sharding}").memory.prefetched_weights == 0


def test_shards_of_whole_tiles_and_others_are_the_same_operations():
    """Tune compares the traces of meshes, and their shards may be the one or the other."""
    plan = plan_of("sharding=fsdp", "model.embed_dim=128", "model.mlp_dim=128")
    padded = replace(plan, weights=jax.tree.map(lambda each: replace(each, tile_rows=64), plan.weights))
    assert read_step(padded) == read_step(plan)


@pytest.mark.parametrize("is_read_again", [False, True])
def test_a_sum_is_written_where_its_slice_lies_unless_something_else_reads_it(is_read_again):
    """A matmul needs a copy of the row of sums that is read, and of the one that is written."""

    def add(sums, gradient, at):
        place = at[0].astype(jnp.int32)
        row = jax.lax.dynamic_slice(sums, (place, 0, 0), (1, 16, 16))
        new = row + gradient * 2
        sums = jax.lax.dynamic_update_slice(sums, new, (place, 0, 0))
        return (sums, row[0] @ new[0]) if is_read_again else sums

    program = _program(add, (4, 16, 16), (1, 16, 16), (1,))
    row = 16 * 16 * 4
    moved = {one.operation.name: one.hbm_bytes for one in price_regions(program, CompilerTraits()).steps}
    copied = 2 * row if is_read_again else 0
    assert (moved["dynamic_slice"], moved["add"], moved["dynamic_update_slice"]) == (copied, 3 * row, copied)


@pytest.mark.parametrize("sequences", [1, 2])
def test_gathered_sequences_are_put_in_order_where_a_device_has_several(sequences):
    """On GPUs, which gather what lies together: shards of one sequence do, and those of two are transposed."""
    plan = plan_of(
        "target=h100-8", "sharding=fsdp_tensor", "mesh.tensor=8", f"global_batch_size={sequences}",
        "sharding.on_replicated=allow", "model.num_heads=8", "model.num_kv_heads=8",
    )  # fmt: skip
    step = price_regions(read_step(plan), plan.target.compiler)
    gathers = [
        (region.program.sizes[one.fused.writes[0]], one.hbm_bytes)
        for region, one in step.each()
        if one.operation.kind == "collective" and "attention_input" in one.operation.scope
    ]
    assert gathers
    assert all(moved == (2 * size if sequences > 1 else 0) for size, moved in gathers)
