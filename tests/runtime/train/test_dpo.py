"""Preferences from the command line: the loss falls from ln 2, and the reference is the model at the start."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import SMALL, spec_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.driver import plan_run
from meshloom.runtime.data import open_data
from meshloom.runtime.weights.find import find_weights
from meshloom.runtime.weights.load import load_params
from support.chats import CHATML, write_folder, write_lines
from support.commands import run_in_process
from support.published import write_published
from support.reference import forward

pytestmark = pytest.mark.ci
SIZES = (*SMALL, "model.num_layers=1", "model.num_heads=4", "model.num_kv_heads=4", "model.vocab_size=1100")
TRAINED = (
    "objective=dpo", "sequence_length=32", "global_batch_size=16", "data.held_out_fraction=0", "target=cpu-8",
    "schedule.num_warmup_steps=0", "optimizer.learning_rate=0.02",
)  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dpo")
    tokenizer = write_folder(folder / "tokenizer", "chatml", CHATML)
    write_published(folder / "base", spec_of(*SIZES).model)
    said = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(32)]
    pairs = write_lines(folder / "pairs.jsonl", *said)
    data = ("data=preferences", f"data.source.paths=[{pairs}]", f"data.tokenizer.path={tokenizer}")
    return *(word for word in SIZES if not word.startswith("data=")), *TRAINED, *data, f"checkpoint.weights_from=hf:{folder / 'base'}"  # fmt: skip  # noqa: E501


def _trained(folder, *words):
    done = run_in_process("train", *words, f"hydra.run.dir={folder}", cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return done, [line["loss"] for line in lines]


def _by_hand(words):
    """The sums of log-probabilities of the base, from logits on one device."""
    spec = spec_of(*words)
    plan, tables = plan_run(spec), []
    params = load_params(plan, plan.mesh.of_devices(jax.devices()[:8]), find_weights(plan), Console(is_quiet=True))
    params = jax.device_put(params, jax.devices()[0])
    for rows in filter(len, open_data(spec).pairs):
        inputs, targets = (np.stack([row[name] for row in map(rows.__getitem__, range(len(rows)))]) for name in ("inputs", "targets"))  # fmt: skip  # noqa: E501
        log_probs = jax.nn.log_softmax(jax.jit(lambda p, x: forward(plan.model, p, x))(params, jnp.asarray(inputs)))
        own = np.take_along_axis(np.asarray(log_probs), np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        tables.append(np.where(targets >= 0, own, 0).sum(axis=1))
    return tables


def test_an_adapter_learns_pairs_against_its_frozen_base(words, tmp_path):
    _, losses = _trained(tmp_path / "run", *words, "adapter=lora", "num_steps=12")
    assert abs(losses[0] - math.log(2)) < 1e-4  # an adapter begins at its base, so all margins are zero
    assert losses[-1] < 0.3
    with np.load(tmp_path / "run/reference.npz") as saved:
        found = [x for name, x in saved.items() if name != "identity" and len(x)]
        (expected,) = _by_hand((*words, "adapter=lora"))
        assert len(expected) == 64  # two rows of each pair
        np.testing.assert_allclose(found, [expected], rtol=1e-4, atol=1e-3)


def test_full_fine_tuning_computes_the_reference_once(words, tmp_path):
    done, losses = _trained(tmp_path / "run", *words, "num_steps=4")
    assert "reference: log-probabilities of 32 pairs by the weights at the start" in done.stderr + done.stdout
    assert abs(losses[0] - math.log(2)) < 1e-4
    file = tmp_path / "run/reference.npz"
    before = file.stat().st_mtime_ns, file.read_bytes()
    done, losses = _trained(tmp_path / "run", *words, "num_steps=8")
    assert "reference: log-probabilities from run/reference.npz" in done.stderr + done.stdout
    assert losses[-1] < math.log(2) - 0.1  # the weights moved, and are still compared with those of the start
    assert (file.stat().st_mtime_ns, file.read_bytes()) == before
