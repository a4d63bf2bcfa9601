"""The bound of a declaration, against sums by hand: it knows no remat, no sharding and no program."""

import pytest

from conftest import plan_of
from meshloom.compiler.core.known import why_unknown
from meshloom.compiler.estimate.roofline import least_step_seconds

WIDTH, HEADS, HEAD_DIM, MLP, LAYERS, VOCABULARY = 64, 4, 16, 128, 3, 512
LENGTH, BATCH, PEAK, BANDWIDTH, CHIPS = 1024, 64, 197e12, 819e9, 8
DECLARED = (
    "model=tiny", f"model.embed_dim={WIDTH}", f"model.num_heads={HEADS}", f"model.num_kv_heads={HEADS}",
    f"model.head_dim={HEAD_DIM}", f"model.mlp_dim={MLP}", f"model.num_layers={LAYERS}",
    f"model.vocab_size={VOCABULARY}", f"sequence_length={LENGTH}", f"global_batch_size={BATCH}", "data=synthetic",
    "precision=bfloat16", f"target=v5e-{CHIPS}", "sharding=fsdp",
)  # fmt: skip
OF_WEIGHTS = 6 * (LAYERS * (4 * WIDTH * HEADS * HEAD_DIM + 3 * WIDTH * MLP) + WIDTH * VOCABULARY) * LENGTH


def seconds(num_pairs: int) -> float:
    """num_pairs: of a query and a key that it sees, in a sequence. Forward 4 D FLOPs for each, backward twice that."""
    attention = LAYERS * 12 * num_pairs * HEADS * HEAD_DIM
    return BATCH * (OF_WEIGHTS + attention) / (PEAK * CHIPS)


@pytest.mark.parametrize(
    ("overrides", "num_pairs"),
    [
        ((), LENGTH * (LENGTH + 1) // 2),
        (("model.attention_windows=[100]",), sum(min(t, 100) for t in range(1, LENGTH + 1))),
        (("data.isolate_documents=true",), LENGTH),  # each of one token, for all that is declared
    ],
    ids=["causal", "window", "documents"],
)
def test_attention_counts_the_scores_that_are_seen(overrides, num_pairs):
    assert least_step_seconds(plan_of(*DECLARED, *overrides)) == pytest.approx(seconds(num_pairs), rel=1e-12)


def test_no_way_to_run_a_declaration_changes_its_bound():
    bounds = {
        least_step_seconds(plan_of(*DECLARED, *overrides))
        for overrides in (
            ("remat=full",), ("remat=none",), ("num_microbatches=2",), ("parallel.attention=xla",),
            ("sharding=fsdp_tensor", "mesh.tensor=2"), ("overlap=auto",),
        )
    }  # fmt: skip
    assert len(bounds) == 1


def test_a_small_batch_is_bound_by_the_state():
    """AdamW: a parameter and two moments of four bytes, read and written."""
    plan = plan_of(*DECLARED, "global_batch_size=8", "sequence_length=128", "model.vocab_size=65536")
    assert least_step_seconds(plan) == pytest.approx(2 * 12 * plan.num_parameters / CHIPS / BANDWIDTH, rel=1e-3)
    masters = plan_of(*DECLARED, "global_batch_size=8", "sequence_length=128", "model.vocab_size=65536",
                      "precision=bfloat16_params")  # fmt: skip
    # The weights of two bytes are made of the masters: written, and not read.
    assert least_step_seconds(masters) == pytest.approx(26 * plan.num_parameters / CHIPS / BANDWIDTH, rel=1e-3)


def test_frozen_parameters_are_not_written():
    plan = plan_of(*DECLARED, "global_batch_size=8", "sequence_length=128", "model.vocab_size=65536",
                   "frozen_parameters=[layers/*]")  # fmt: skip
    trained = 2 * 65536 * WIDTH + WIDTH  # embedding, head and its norm
    assert least_step_seconds(plan) == pytest.approx(24 * trained / CHIPS / BANDWIDTH, rel=1e-3)


def test_a_chip_that_is_not_known_has_no_bound():
    assert "peak" in why_unknown(least_step_seconds(plan_of("target=cpu-8")))
