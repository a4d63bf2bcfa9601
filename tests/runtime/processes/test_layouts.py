"""Eight devices in one, two and four processes train alike, whatever is split over them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import SMALL
from support.several import Started, free_port, keys

RUN = (*SMALL, "model.num_layers=2", "num_steps=4", "target=cpu-8", "evaluation.num_batches=2", "checkpoint=disabled",
       "compilation_cache=null", "logging=quiet")  # fmt: skip
LAYOUTS = {
    "fsdp": ("sharding=fsdp",),
    "hsdp": ("sharding=hsdp", "mesh.replica=2"),
    "tensor": ("sharding=fsdp_tensor", "mesh.tensor=4"),
    "context": ("sharding=fsdp_context", "mesh.context=4", "sequence_length=32"),
    "stage": ("mesh.stage=4", "num_microbatches=4", "pipeline.head=stages", "model.num_layers=6"),
    "expert": ("model=tiny_moe", "sharding=fsdp_expert", "mesh.fsdp=2", "mesh.expert=4"),
}


def trained(folder: Path, num_processes: int, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of a run."""
    run = (*RUN, *overrides, f"hydra.run.dir=of-{num_processes}")
    lines = [(*run, *each) for each in keys(num_processes, free_port())] if num_processes > 1 else [run]
    ended = Started(folder, *lines).end()
    assert [code for code, _, _ in ended] == [0] * num_processes, ended
    return [json.loads(line) for line in (folder / f"of-{num_processes}/metrics.jsonl").read_text().splitlines()]


@pytest.mark.release
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_the_same_to_six_digits_in_1_2_and_4_processes(layout, tmp_path):
    alone = trained(tmp_path, 1, *LAYOUTS[layout])
    assert [line["step"] for line in alone] == [1, 2, 3, 4]
    for num_processes in (2, 4):
        several = trained(tmp_path, num_processes, *LAYOUTS[layout])
        for key in ("loss", "grad_norm"):
            one, other = ([line[key] for line in lines] for lines in (alone, several))
            np.testing.assert_allclose(one, other, rtol=1e-6)
        assert several[-1]["eval_loss"] == pytest.approx(alone[-1]["eval_loss"], rel=1e-6)
