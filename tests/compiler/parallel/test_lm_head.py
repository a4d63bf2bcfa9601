"""The head's vocabulary in parts: which parts, when, and what crosses then. That losses and gradients are those of the
whole head: tests/compiler/parallel/test_loss.py, tests/compiler/step/test_equivalence.py."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from conftest import LINEAR_STACK, plan_of, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.driver import plan_run
from meshloom.compiler.parallel.lm_head import LmHeadOp, chunk_sizes, cut_refusal
from meshloom.compiler.parallel.operation import Refusal
from meshloom.compiler.parallel.registry import OPERATIONS
from meshloom.compiler.schema import Report
from meshloom.models import Piece
from support.collectives import written_collectives
from support.commands import meshloom

CHUNKS, WHOLE = "parallel.lm_head=vocab_chunks", "parallel.lm_head=whole"
LLAMA3_V6E = (
    "target=v6e-64", "sharding=fsdp", "precision=bfloat16", "model.embed_dim=4096", "model.vocab_size=128256",
    "sequence_length=2048", "global_batch_size=256", "overlap=prefetch",
)  # fmt: skip


def test_declared_chunks_of_the_loss_are_made():
    """Whatever the limits on logits allow; a number that cuts no sequence evenly is refused."""
    loss = plan_of("loss.num_chunks=8", "loss.max_logits_bytes=1000000000").operation("loss")
    assert (loss.chosen.name, loss.chosen.parameters) == ("sequence_chunks", 8)
    assert plan_of("loss.num_chunks=1", "loss.max_logits_bytes=1").operation("loss").chosen.name == "at_once"
    with pytest.raises(
        ConfigError, match=r"loss\.num_chunks: does not divide the 16 tokens .*\n.*use one of 1, 2, 4, 8"
    ):
        plan_of("loss.num_chunks=3")


@pytest.mark.parametrize("vocab_size", [8, 256, 257, 264, 32000, 50304, 128256, 151643, 151936, 256128])
@pytest.mark.parametrize("max_odd_factor", [None, 1, 3, 26])
def test_parts_are_all_of_the_vocabulary_and_each_can_be_reduce_scattered(vocab_size, max_odd_factor):
    sizes = chunk_sizes(vocab_size, max_odd_factor)
    assert sum(sizes) == vocab_size
    assert len(sizes) > 1
    assert max(sizes) <= 0.8 * vocab_size
    for size in sizes:
        while size % 2 == 0:
            size //= 2
        assert not max_odd_factor or size <= max_odd_factor


def test_parts_of_llama3_on_64_chips():
    """1,664 / 64 = 26: 25 x 4,096 entries, 25 x 1,024, and the rest. 8,192 tokens of 8 KiB, four times for each part
    but one, at 1.64 TB/s."""
    plan = plan_of(*LLAMA3_V6E, "overlap.flag_presets=[sparse_core]")
    head = plan.operation("lm_head")
    assert head.chosen.parameters == (256, 25 * 1024, 25 * 4096)
    assert head.how == (
        "in chunks of 256, 25,600, 102,400 entries of the vocabulary: "
        "5.77 ms of gather, 328 µs for its input read more often"
    )


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("overlap.flag_presets=[]",),
         "vocab_chunks is not used: with these XLA options no gather runs beside the head's matmuls"),
        (("overlap.flag_presets=[sparse_core]", "loss.max_logits_bytes=1", "loss.max_logits_share=0.05"),
         "vocab_chunks is not used: each of 4 chunks of tokens needs the whole vocabulary"),
        ((WHOLE,), "parallel.lm_head=whole"),
        (("overlap.flag_presets=[sparse_core]", "global_batch_size=256", "model.vocab_size=2048"),
         "112 µs of gather, 164 µs for its input read more often"),
        (("target=cpu-8",),
         "vocab_chunks is not used: the compiler for cpu-8 does not wait for the head's gather before the layers"),
    ],
)  # fmt: skip
def test_where_the_head_stays_whole(overrides, why):
    plan = plan_of(*LLAMA3_V6E, *overrides)
    head = plan.operation("lm_head")
    assert (head.chosen.name, head.reason) == ("whole", why)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("sharding=fsdp", "model.embeddings=tied"), "the embedding has the same weights"),
        (("sharding=fsdp_tensor", "mesh.tensor=2"), "the vocabulary is split over tensor"),
        (("sharding=zero1", "sharding.on_replicated=allow"), "its weights are whole on every device"),
    ],
)
def test_a_head_that_cannot_be_cut_is_an_error_where_that_is_demanded(overrides, why):
    with pytest.raises(ConfigError) as error:
        plan_of(*overrides, CHUNKS)
    (problem,) = error.value.problems
    assert (problem.where, problem.what) == ("parallel.lm_head", f"'vocab_chunks' cannot be used: head: {why}")
    told = plan_of(*overrides, "parallel.lm_head=auto").operation("lm_head").reason
    assert told == f"vocab_chunks is not used: {why}"


def test_it_is_told_with_what_else_cannot_be():
    with pytest.raises(ConfigError) as error:
        plan_of("sharding=fsdp", "model.embeddings=tied", CHUNKS, "parallel.embedding=all_to_all")
    assert [problem.where for problem in error.value.problems] == ["parallel.embedding", "parallel.lm_head"]


def _scaled(params, x, _):
    return jnp.einsum("bte,ev->btv", x, params["kernel_EV"]) * 2


def _normalised(params, x, _):
    return jax.nn.log_softmax(jnp.einsum("bte,ev->btv", x, params["kernel_EV"]))


def _reshaped(params, x, _):
    return (x.reshape(-1, 32) @ params["kernel_EV"]).reshape(*x.shape[:2], 264)


def _broken(params, x, _):
    return x @ params["kernel"]


@pytest.mark.parametrize(
    ("apply", "why"),
    [
        (_scaled, None),
        (_normalised, "its logits are not each made of their own entries of the parameters"),
        (_reshaped, "it does not take a part of the vocabulary (TypeError: "),
    ],
)
def test_a_head_that_computes_across_the_vocabulary_is_not_cut(apply, why):
    found = _refusal_of(apply, "my_package:Config")
    assert found == why if why is None else (found or "").startswith(why)


def test_a_mistake_in_a_head_of_ours_is_not_taken_for_a_refusal():
    with pytest.raises(KeyError):
        _refusal_of(_broken, "linear_stack")


def _refusal_of(apply, family: str) -> str | None:
    plan = plan_of("sharding=fsdp", *LINEAR_STACK)
    head: Piece = replace(plan.model.head, apply=apply)
    spec = plan.spec.model_copy(update={"model": plan.spec.model.model_copy(update={"family": family})})
    return cut_refusal(spec, replace(plan.model, head=head))


def test_parts_cross_one_by_one_and_no_byte_more():
    """Eight devices, a vocabulary of 264: parts of 56 and 208. As the step is written;
    tests/compiler/step/test_collectives.py compares that with the compiled program."""
    found = {}
    for head in (WHOLE, CHUNKS):
        plan = plan_of("sharding=fsdp", "model.vocab_size=264", head)
        found[head] = written_collectives(plan)
    assert plan.operation("lm_head").chosen.parameters == (56, 208)
    (counts, elements), (counts_in_parts, elements_in_parts) = found[WHOLE], found[CHUNKS]
    assert elements == elements_in_parts
    assert counts_in_parts - counts == {"all-gather": 1, "reduce-scatter": 1}


class Halves(LmHeadOp):
    """The head by one more strategy, under a name that nothing else knows."""

    names = (*LmHeadOp.names, "halves")

    def strategies(self, site, inputs):
        of_head, whole = super().strategies(site, inputs)
        sizes = (inputs.spec.model.vocab_size // 2,) * 2
        return (
            of_head,
            whole,
            replace(of_head, name="halves", parameters=sizes, refusal=Refusal("by name alone", is_hard=False)),
        )


def test_a_strategy_of_another_name_is_planned_as_it_runs():
    """What the plan says of the weights, and what the step does with them, are one decision."""
    ops = tuple(Halves() if isinstance(op, LmHeadOp) else op for op in OPERATIONS)
    spec = spec_of("sharding=fsdp", "model.vocab_size=264")
    halves, whole = (
        plan_run(spec.model_copy(update={"parallel": {**spec.parallel, "lm_head": name}}), ops)
        for name in ("halves", "whole")
    )
    assert [plan.weights["head"]["kernel_EV"].use for plan in (halves, whole)] == ["chunked", "gathered"]
    (counts, elements), (counts_in_halves, elements_in_halves) = map(written_collectives, (whole, halves))
    assert elements == elements_in_halves
    assert counts_in_halves - counts == {"all-gather": 1, "reduce-scatter": 1}


HEAD_OF_LLAMA3 = (
    "model=linear_stack", "model.vocab_size=128256", "model.embed_dim=1024", "model.num_layers=2", "data=synthetic",
    "precision=bfloat16", "precision.gradient_reduction=bfloat16", "sharding=fsdp", "target=v6e-64",
    "sequence_length=1024", "global_batch_size=512", "overlap=prefetch", "overlap.flag_presets=[sparse_core]",
)  # fmt: skip


@pytest.mark.tpu
@pytest.mark.release
def test_on_a_tpu_parts_are_hidden_and_reduce_scattered(tmp_path):
    """As XLA has it: the whole head is gathered in front of the layers, and its gradient is all-reduced (501 x 64 is
    more than 1,664)."""
    pytest.importorskip("libtpu", reason="pip install -e '.[tpu]'")
    gathered, summed, fixes = {}, {}, {}
    for head in ("whole", "auto"):
        folder = tmp_path / head
        done = meshloom("compile", *HEAD_OF_LLAMA3, f"parallel.lm_head={head}", f"hydra.run.dir={folder}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        report = Report.model_validate_json((folder / "report.json").read_text())
        of_kernel = [one for one in report.collectives if one.source.startswith("head/kernel_EV")]
        gathered[head] = [one for one in of_kernel if one.kind == "all-gather"]
        fixes[head] = {finding.rule: finding.fix for finding in report.findings}
        summed[head] = Counter[str]()
        for one in of_kernel:
            summed[head][one.kind] += one.bytes
    kernel_bytes = 128256 * 1024 * 2
    assert summed["whole"] == {"all-gather": kernel_bytes, "all-reduce": kernel_bytes}
    assert summed["auto"] == {"all-gather": kernel_bytes, "reduce-scatter": kernel_bytes}
    assert fixes["whole"]["gradient-not-scattered"].startswith("cut the vocabulary: parallel.lm_head=vocab_chunks, or ")
    assert not fixes["auto"]
    hidden = {head: sum(one.hidden_seconds for one in found) for head, found in gathered.items()}
    alone = {head: sum(one.alone_seconds for one in found) for head, found in gathered.items()}
    assert hidden["whole"] < alone["whole"] / 2
    assert hidden["auto"] > alone["auto"] / 2
