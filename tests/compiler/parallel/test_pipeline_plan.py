"""The plan of a pipeline: its table, the layers of each stage, and what is said of a declaration that none can run."""

import pytest

from conftest import POINTWISE, plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.user_code import code_allowed_from
from meshloom.compiler.pipeline.schedules import build_table
from meshloom.compiler.pipeline.table import PipelineOp, TickForm
from meshloom.compiler.pipeline.table_file import write_table
from meshloom.compiler.report.explain import plan_as_json
from support.programs import plan_as_declared

STAGED = ("mesh.stage=2", "num_microbatches=4", "remat=full", "model.num_layers=4")


@pytest.mark.parametrize(
    ("name", "ticks"), [("gpipe", "multi"), ("1f1b", "multi"), ("1f1b", "unit"), ("zb_h1", "unit")]
)
def test_a_plan_holds_the_table_of_its_schedule(name, ticks):
    plan = plan_of(*STAGED, f"pipeline={name}", f"pipeline.ticks={ticks}", "remat=none")
    assert plan.pipeline is not None
    assert plan.pipeline.table == build_table(name, 2, 1, 4, TickForm(ticks))
    assert plan.pipeline.layers.totals == (2, 2)
    if name == "1f1b":  # p - s in unit ticks, 2 (p - s) - 1 in ticks of several operations
        assert plan.pipeline.in_flight == ((3, 1) if ticks == "multi" else (2, 1))


def test_explain_tells_the_table():
    told = plan_as_json(plan_of(*STAGED, "pipeline=1f1b", "pipeline.ticks=unit", "remat=none"))["pipeline"]
    assert told["ticks"][0] == ["F0", ""]
    assert told["in_flight_by_stage"] == [2, 1]
    on_last = [slot for _, slots in told["ticks"] for slot in slots.split("+")]
    assert on_last.count("F3") == 1


def test_the_form_of_ticks_is_the_one_that_takes_least_time():
    """By the table itself: with nothing computed again and free permutes, B and W apart fill gaps that BW leaves."""
    auto, multi, unit = (plan_of(*STAGED, f"pipeline.ticks={ticks}").pipeline for ticks in ("auto", "multi", "unit"))
    assert auto is not None
    assert multi is not None
    assert unit is not None
    assert auto.time.seconds == min(multi.time.seconds, unit.time.seconds)
    assert multi.time.seconds != unit.time.seconds


def test_what_is_computed_again_is_an_operation_of_its_own_where_that_is_shorter():
    ops = {
        remat: plan.pipeline.table.ops
        for remat in ("none", "full")
        if (plan := plan_of(*STAGED, "pipeline=zb_h1", f"remat={remat}")).pipeline
    }
    assert (PipelineOp.RECOMPUTE in ops["none"], PipelineOp.RECOMPUTE in ops["full"]) == (False, True)


def test_a_table_of_a_file_is_run_as_it_is_or_in_ticks_of_a_form(tmp_path):
    multi = build_table("1f1b", 2, 1, 4, TickForm.MULTI)
    file = tmp_path / "mine.csv"
    file.write_text(write_table(multi))
    plans = [plan_of(*STAGED, f"pipeline.table={file}", *words) for words in ((), ("pipeline.ticks=unit",))]
    found = [plan.pipeline.table.rows for plan in plans if plan.pipeline]
    assert found[0] == multi.rows
    assert max(len(slots) for row in found[1] for slots in row) == 1


def test_each_stage_holds_its_part_of_the_layers():
    alone, staged = plan_of("remat=full", "model.num_layers=4", "mesh.fsdp=4", "target=cpu-4"), plan_of(*STAGED)
    halved = {
        one.array.path: other.bytes_per_device / one.bytes_per_device
        for one, other in zip(alone.sharding.parameters, staged.sharding.parameters, strict=True)
    }
    assert {path.split("/")[0]: share for path, share in halved.items()} == {"embed": 1, "head": 1, "layers": 0.5}


def test_a_stage_holds_a_part_of_every_layer_where_stages_have_different_numbers():
    """A part of each weight, as much of the model as with layers on their stages; and of the state likewise."""
    even, uneven = (plan_of(*STAGED, "mesh.fsdp=2", "target=cpu-4", f"pipeline.layers={n}") for n in ("even", "[3,1]"))
    for table in ("parameters", "optimizer"):
        for one, other in zip(getattr(even.sharding, table), getattr(uneven.sharding, table), strict=True):
            assert other.bytes_per_device == one.bytes_per_device, one.array.path
            if one.array.path.startswith("layers"):
                (split,) = (d.logical for d in other.dimensions if "stage" in d.axes)
                assert split != "layers"


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (("model=qwen3_235b_a22b", "mesh.stage=8", "mesh.expert=8", "target=h100-64"), [11, *[12] * 6, 11]),
        (("model=deepseek_v3", "mesh.stage=16", "mesh.expert=16", "target=h100-256"), [3, 3, *[4] * 13, 3]),
    ],
)
def test_experts_may_have_layers_that_stages_do_not_divide(words, numbers):
    """The state has a part of each device's experts on each stage; tokens are exchanged over `expert` alone."""
    plan = plan_as_declared(
        *words, "sharding=fsdp_expert", "mesh.fsdp=1", "num_microbatches=32", "global_batch_size=512",
        "sequence_length=4096", "data=synthetic", "remat=full",
    )  # fmt: skip
    assert plan.pipeline is not None
    assert sorted(plan.pipeline.layers.totals) == sorted(numbers)
    assert plan.pipeline.layers.totals[-1] == numbers[-1]
    (stored,) = (p.dimensions[1].axes for p in plan.sharding.parameters if p.array.path == "layers/mlp/up_XEM")
    (exchange,) = (each.chosen.parameters for each in plan.operations if each.op.kind == "experts")
    assert (stored, exchange.experts.axes) == (("expert", "stage"), ("expert",))


def test_the_last_stage_has_fewer_layers_where_the_head_takes_as_long():
    """A head of 65,536 words takes as long as several layers of width 32."""
    words = ("model.vocab_size=65536", "model.num_layers=12", "pipeline.ticks=multi")
    even, balanced = (plan_of(*STAGED, *words, f"pipeline.layers={how}").pipeline for how in ("even", "balanced"))
    assert even is not None
    assert balanced is not None
    assert even.layers.totals == (6, 6)
    assert balanced.layers.totals[1] < 6
    assert sum(balanced.layers.totals) == 12
    assert balanced.time.seconds < even.time.seconds
    assert f"{balanced.layers.totals[1]} in the last" in balanced.reason


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("pipeline.layers=[3,2]",), "has 5 layers in 2 parts, and 4 layers run in 2 parts"),
        (("pipeline.layers=[2,1,1]",), "has 4 layers in 3 parts, and 4 layers run in 2 parts"),
        (("pipeline.layers=[5,-1]",), r"\[5, -1\] is not even, balanced or a number of layers for each part"),
        (("pipeline.layers=odd",), "odd is not even, balanced or a number of layers for each part"),
        (("pipeline=zb_v", "model.num_layers=3"), "2 stages of 2 chunks each are more than the 3 layers of the model"),
    ],
)
def test_numbers_of_layers_that_are_not_those_of_the_model_are_an_error(words, what):
    with pytest.raises(ConfigError, match=what):
        plan_of(*STAGED, *words)


def test_a_pipeline_without_stages_is_told():
    plan = plan_of("pipeline=gpipe", "pipeline.layers=[1,3]", "pipeline.head=auto", "pipeline.gather=use")
    assert plan.pipeline is None
    assert [problem.where for problem in plan.warnings] == [
        "pipeline.schedule", "pipeline.layers", "pipeline.head", "pipeline.gather"
    ]  # fmt: skip
    assert plan.warnings[1].what == "is [1, 3], and the mesh has no stages: nothing runs by it"
    assert not plan_of().warnings


def test_all_that_no_pipeline_can_run_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        plan_of("mesh.stage=2", "num_microbatches=4", "overlap=prefetch", "model.num_layers=1")
    assert {problem.where for problem in caught.value.problems} == {
        "mesh.stage", "overlap.layers.prefetch",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "kind", "strategy"),
    [
        (("sharding=fsdp_context", "mesh.context=2"), "context", "ring"),
        (("sharding=fsdp_tensor", "mesh.tensor=2"), "matmul", "collective_matmul"),
    ],
)
def test_nothing_runs_in_a_ring_within_a_stage(words, kind, strategy):
    plan = plan_of(*STAGED, *words, "token_order=contiguous")
    assert all(each.chosen.name != strategy for each in plan.operations_of(kind))
    with pytest.raises(ConfigError, match="permutes span every stage"):
        plan_of(*STAGED, *words, f"parallel.{kind}={strategy}")


TABLE, KERNEL = "embed/table_VE", "head/kernel_EV"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("target=cpu-2", "sharding=ddp"), {TABLE: 1, KERNEL: 2}),
        (("target=cpu-2", "sharding=ddp", "model.embeddings=tied"), {TABLE: 2}),
        (("target=cpu-8", "sharding=fsdp_tensor", "mesh.fsdp=2", "mesh.tensor=2"), {TABLE: 4, KERNEL: 8}),
    ],
)
def test_stages_that_share_the_head_hold_parts_of_its_vocabulary(words, parts):
    plan = plan_of(*STAGED, *words, "pipeline.head=stages")
    for plans in (plan.sharding.parameters, plan.sharding.optimizer):
        arrays = {each.array.path: each for each in plans}
        assert {path: arrays[path].array.num_bytes // arrays[path].bytes_per_device for path in parts} == parts
    logits = next(each for each in plan.sharding.activations if each.array.path == "logits")
    assert "stage" in logits.dimensions[-1].axes


def test_a_head_that_stages_cannot_share_is_told():
    words = (*STAGED, "model.vocab_size=265")
    with pytest.raises(ConfigError, match="they cannot share the head: its vocabulary of 265 is not a multiple of 2"):
        plan_of(*words, "pipeline.head=stages")
    head = head_of(*words)
    assert (head.place, "not a multiple of" in head.reason) == ("last", True)


def test_auto_shares_a_head_where_that_takes_less_time():
    """A head of many entries makes all stages wait for the last one; one of few costs less than what stages send."""
    words = (
        "target=v5e-4",
        "precision=bfloat16",
        "mesh.fsdp=2",
        "model.embed_dim=1024",
        "sequence_length=1024",
        "pipeline=1f1b",
    )
    few, many = (head_of(*STAGED, *words, f"model.vocab_size={size}") for size in (256, 131_072))
    assert (few.place, many.place) == ("last", "stages")
    assert "if stages share it" in many.reason


def test_where_times_are_not_known_auto_leaves_the_head_on_the_last_stage():
    head = head_of(*STAGED)
    assert (head.place, head.reason) == ("last", "how long stages would take to share it is not known")


def head_of(*words):
    pipeline = plan_of(*words, "pipeline.head=auto").pipeline
    assert pipeline is not None
    return pipeline.head


PAIRS = """
from typing import ClassVar

from meshloom.models import Model, Stack, build_piece
from support.pointwise import Embed, Head, Layer, PointwiseConfig


class EmbedsTwo(Embed):
    def __call__(self, tokens_BT, context):
        x_BTE = super().__call__(tokens_BT, context)
        return x_BTE, x_BTE


class GivesTwo(Layer):
    def __call__(self, x_BTE, context):
        x_BTE, aux = super().__call__(x_BTE, context)
        return {"x": x_BTE, "before": x_BTE}, aux


class Embedded(PointwiseConfig):
    pieces: ClassVar = (EmbedsTwo, Layer, Head)

    def build(self):
        embed, layer, head = (build_piece(lambda rngs, kind=kind: kind(self, rngs)) for kind in self.pieces)
        return Model(embed, (Stack("layers", layer, self.num_layers),), head)


class Layered(Embedded):
    pieces: ClassVar = (Embed, GivesTwo, Head)
"""


@pytest.mark.parametrize(("name", "what"), [("Embedded", "EmbedsTwo"), ("Layered", "GivesTwo")])
def test_a_model_whose_layers_exchange_more_than_one_array_is_told_so(name, what, tmp_path, monkeypatch):
    """Before the step is traced, as for every model: what stages send is one array."""
    (tmp_path / "pairs.py").write_text(PAIRS)
    monkeypatch.syspath_prepend(tmp_path)
    with code_allowed_from(["pairs", "support.pointwise"]), pytest.raises(ConfigError) as raised:
        plan_of(*POINTWISE, f"model.family=pairs:{name}", "mesh.stage=2", "num_microbatches=4")
    (problem,) = raised.value.problems
    assert (problem.where, problem.what.split()[0]) == ("model.family", f"{what}.__call__")
    assert problem.fix.startswith("return an array of shape (")
