"""Pipelines from the command line: a run on 4 stages, continued on 2 by another schedule, and without stages."""

import json

import numpy as np
import pytest

from conftest import SMALL
from support.commands import run_in_process

pytestmark = pytest.mark.ci
WORDS = (
    *SMALL, "model.num_layers=6", "model.num_heads=4", "model.num_kv_heads=4", "num_microbatches=4", "num_steps=4",
    "checkpoint.every_num_steps=2", "evaluation.every_num_steps=4", "evaluation.num_batches=2",
    "data.packing=first_fit", "data.isolate_documents=true", "optimizer.max_grad_norm=0.5",
)  # fmt: skip


def _trained(folder, *words):
    done = run_in_process("train", *WORDS, *words, f"hydra.run.dir={folder}", cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[line["loss"], line["grad_norm"], line["eval_loss"] or 0.0] for line in lines]


def test_a_run_on_stages_goes_on_with_other_stages_and_with_none(tmp_path):
    """The same losses, norms of gradients and held-out loss, whatever runs the layers from the same checkpoint on. Four
    stages have one or two of the six layers, and a part of each in the state; two stages have three chunks of one."""
    four = _trained(tmp_path / "four", "target=cpu-4", "mesh.stage=4", "mesh.fsdp=1", "remat=full")
    assert four[-1][0] < four[0][0]
    start = f"checkpoint.restore_from={tmp_path / 'four/checkpoints/2'}"
    two = _trained(
        tmp_path / "two", start, "target=cpu-4", "mesh.stage=2", "mesh.fsdp=2", "pipeline=interleaved_1f1b",
        "pipeline.num_chunks=3",
    )  # fmt: skip
    none = _trained(tmp_path / "none", start, "target=cpu-1")
    assert len(two) == len(none) == 2
    np.testing.assert_allclose(none, four[2:], rtol=1e-5)
    np.testing.assert_allclose(two, four[2:], rtol=1e-5)
