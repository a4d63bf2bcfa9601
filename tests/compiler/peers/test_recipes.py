"""Public recipes (bench/imports.jsonl): what the import makes of them, and what was declared by hand before."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshloom.compiler.core.key_paths import leaves
from meshloom.compiler.declare.compose import Request, read_spec

BENCH = Path(__file__).parents[3] / "bench"
OF_A_RUN = ("num_steps", "schedule.", "optimizer.learning_rate", "optimizer.weight_decay_on", "run.",
            "compiler_options", "overlap.flag_presets")  # fmt: skip
SLOWER_H100 = {"target.chip.hbm_bytes_per_second", "target.chip.power_limit_watts"}
SCALED = {f"model.rope_scaling.{key}" for key in
          ("kind", "factor", "low_frequency_factor", "high_frequency_factor", "original_length")}  # fmt: skip
# The published row, the recipe, and the keys in which they differ, each for a reason that docs/results/imports.md has
PAIRS = {
    "torchtitan Llama 3.1 8B, 8 H100": ("torchtitan Llama 3.1 8B of 2024-12, h100-8", SLOWER_H100 | SCALED),
    "torchtitan Llama 3.1 8B, 128 H100": ("torchtitan Llama 3.1 8B of 2024-12, h100-128", SLOWER_H100 | SCALED),
    "torchtitan Llama 3.1 70B, 256 H100": ("torchtitan Llama 3.1 70B of 2025-06, h100-256", SLOWER_H100),
    "torchtitan Llama 3.1 70B, 256 H100, asynchronous": (
        "torchtitan Llama 3.1 70B of 2025-06, asynchronous, h100-256", SLOWER_H100),
    "MaxText 16B, v5e-256": ("MaxText default-16b-v5e-256, v5e-256", set()),
    "MaxText 32B, v5e-256": ("MaxText default-32b-v5e-256, v5e-256", set()),
    "MaxText 64B, v5e-256": ("MaxText default-64b-v5e-256, v5e-256", set()),
    "MaxText 32B, v5p-128, its remat": ("MaxText tpu/v5p/32b.sh, v5p-128", {"global_batch_size"}),
    "MaxText 128B, v5p-256": ("MaxText tpu/v5p/128b.sh, v5p-256", set()),
    "MaxText Llama 3.1 8B, v6e-256": ("MaxText llama3_1-8b-8192, v6e-256", set()),
    "MaxText Llama 3.1 70B, v6e-256": ("MaxText llama3_1-70b-8192, v6e-256", set()),
    "MaxText Mistral 7B, v6e-8": ("MaxText mistral-7b, v6e-8", {"model.rope_theta"}),
    "MaxText Mixtral 8x7B, v6e-256": ("MaxText mixtral_8x7b_dropped, v6e-256", set()),
    "MaxText Mixtral 8x22B, v6e-256": ("MaxText mixtral_8x22b_dropped, v6e-256", set()),
    "MaxText Gemma 3 12B, 32k tokens, v6e-256": ("MaxText gemma3-12b-32768-v6e256, v6e-256", {"loss.num_chunks"}),
    "MaxText DeepSeek-V3, v5p, 512 chips": ("MaxText deepseek3_671b_v5p_1024, v5p-1024", set()),
    "MaxText Llama 2 7B, 256 H100": (
        "MaxText llama-2-7b-256gpus-a3mega-bf16",
        {"remat.policy", "remat.names", "target.network.node_bytes_per_second"}),
    "MaxText Llama 3.1 70B, 256 H200": ("MaxText llama3-1-70b-256gpus-a3u-bf16", set()),
    "MaxText Llama 3.1 70B, 64 Ironwood": (
        "MaxText llama3.1-70b, 8k-bf16-tpu7x-4x4x4", {"optimizer.first_moment_dtype"}),
    "MaxText Llama 3.1 70B, 128k tokens, 256 Ironwood": (
        "MaxText llama3.1-70b, 128k-bf16-tpu7x-4x8x8", {"loss.num_chunks", "parallel.context", "remat.names"}),
    "MaxText DeepSeek-V3, 128 Ironwood": (
        "MaxText deepseek3-671b, 4k-bf16-tpu7x-4x4x8",
        {"optimizer.first_moment_dtype", "optimizer.moment_dtype", "precision.gradients"}),
}  # fmt: skip


@pytest.fixture
def imports(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("imports")


def values_of(overrides: tuple[str, ...]) -> dict[str, Any]:
    """Returns the values of a declaration that decide its program. A layer's input is saved in any case."""
    spec = read_spec(Request(overrides), lambda spec: spec.model_dump(mode="json"))
    found = {key: value for key, value in leaves(spec) if not key.startswith(OF_A_RUN)}
    if found["remat.policy"] == "save_names":
        found["remat.names"] = sorted(set(found["remat.names"]) - {"layer_input"})
    return found


def test_recipes_are_imported_as_they_were(imports):
    rows = imports.read_rows()
    assert len(rows) >= 70
    assert sum(bool(row["overrides"]) for row in rows) >= 55
    assert [row["name"] for row in rows if imports.import_row(row) != (row["overrides"], row["problems"])] == []


def test_each_recipe_is_from_a_commit(imports):
    assert [row["name"] for row in imports.read_rows() if not has_commit(row["source"])] == []


def has_commit(address: str) -> bool:
    return any(len(part) >= 12 and set(part) <= set("0123456789abcdef") for part in address.split("/"))


def differences(row: dict[str, Any], overrides: tuple[str, ...]) -> Iterator[str]:
    ours, theirs = values_of(overrides), values_of(tuple(row["overrides"]))
    yield from (key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))


@pytest.mark.parametrize("name", PAIRS)
def test_declaration_is_that_of_an_earlier_reading_by_hand(name, imports):
    recipe, allowed = PAIRS[name]
    (published,) = (each for each in importlib.import_module("published_recipes").RECIPES if each.name == name)
    (row,) = (each for each in imports.read_rows() if each["name"] == recipe)
    assert set(differences(row, published.overrides)) == allowed


@pytest.mark.ci
def test_each_recipe_composes(imports):
    for row in imports.read_rows():
        if row["overrides"]:
            read_spec(Request(tuple(row["overrides"])), lambda spec: spec)
