"""Predicts what published pairs of runs gained that differ in little but precision, and compares.

    python bench/precision.py [--rows TEXT]

Each row is estimated as bfloat16, with its matmuls in the type of the run, and, where that is float8 with scales of
tensors, with weights gathered so, too. Nothing is fitted to a pair. Rows are kept in bench/precision.jsonl, and
`results` prints their table.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_rows import Overrides, estimated, read_lines
from prediction_range import Run
from published_recipes import FSDP, GRAND_TETON, RECIPES, TPU7X, declared, maxtext

from meshloom.compiler.target.accuracy import LOW_PRECISION

KEPT = Path(__file__).with_suffix(".jsonl")
FP8 = "precision=fp8"
GATHERED = "precision.matmuls=[{match:null,forward:fp8,gradients:fp8_e5m2,gather:fp8}]"


@dataclass(frozen=True)
class Pair:
    """Two runs of one declaration. ratio: the step in bfloat16 over the step in few bits, as published. note: how the
    declaration differs from the runs. few_bits: declares the second run."""

    name: str
    ratio: float
    overrides: Overrides
    note: str = ""
    few_bits: str = FP8

    @property
    def chip(self) -> str:
        (target,) = (word for word in self.overrides if word.startswith("target="))
        return target.removeprefix("target=").split("-")[0]

    @property
    def source(self) -> str:
        return "AI-Hypercomputer/tpu-recipes" if self.chip == "tpu7x" else "pytorch/torchtitan"


def _recipe(name: str) -> Overrides:
    (found,) = (one for one in RECIPES if one.name == name)
    return found.declaration


IRONWOOD_REMAT = "remat.names=[layer_input,queries,keys,values,attended]"
OPTIONS = tuple(f"+compiler_options.{key}={str(value).lower()}" for key, value in TPU7X.items())
# training/ironwood/deepseek3-671b has shard_exp_on_fsdp, use_tokamax_gmm and a fixed calibration. With these three
# MaxText gathers the quantized matrices of experts (kernels/megablox/ops.py).
QUANTIZED_GATHERS = "gathered in float8, as the runs do"
PAIRS = (
    Pair("70B, 8k tokens, 64 Ironwood", 1.54, _recipe("MaxText Llama 3.1 70B, 64 Ironwood")),
    Pair("70B, 8k tokens, 256 Ironwood", 1.54,
         (*maxtext("llama3_70b", "tpu7x-512", 4, 256, 8192, "save_names", FSDP, IRONWOOD_REMAT), *OPTIONS)),
    Pair("70B, 128k tokens, 256 Ironwood", 1.13, _recipe("MaxText Llama 3.1 70B, 128k tokens, 256 Ironwood")),
    Pair("405B, 8k tokens, 256 Ironwood", 1.53,
         (*maxtext("llama3_405b", "tpu7x-512", 2, 256, 8192, "full", FSDP), *OPTIONS), "the runs had other remat"),
    Pair("DeepSeek-V3, 128 Ironwood", 1.20, _recipe("MaxText DeepSeek-V3, 128 Ironwood"), QUANTIZED_GATHERS, GATHERED),
    Pair("DeepSeek-V3, 256 Ironwood", 1.21,
         (*maxtext("deepseek_v3", "tpu7x-512", 16, 256, 4096, "offload", FSDP, "remat.names=[layer_input]",
                   "optimizer.moment_dtype=bfloat16"), *OPTIONS), QUANTIZED_GATHERS, GATHERED),
    Pair("Qwen3-235B, 256 Ironwood", 1.12,
         (*maxtext("qwen3_235b_a22b", "tpu7x-512", 8, 256, 4096, "offload", FSDP, "remat.names=[layer_input]"),
          *OPTIONS)),
    Pair("8B, 8 H100", 1.28, declared("llama3_8b", "h100-8", 2, 8, 8192, "save_dots", FSDP, *GRAND_TETON)),
    Pair("8B, 128 H100", 1.29, declared("llama3_8b", "h100-128", 2, 128, 8192, "save_dots", FSDP, *GRAND_TETON)),
    Pair("8B, 8 B200", 1.20, declared("llama3_8b", "b200-8", 2, 8, 8192, "save_dots", FSDP),
         few_bits="precision=mxfp8"),
)  # fmt: skip


def predict(pair: Pair) -> dict[str, Any]:
    """Returns a row: all estimated steps, or why one cannot be declared."""
    before, after = (estimated((*pair.overrides, *more)) for more in ((), (pair.few_bits,)))
    row = {"name": pair.name, "published": pair.ratio}
    if why := before["why_not"] or after["why_not"]:
        return row | {"why_not": why}
    row |= {"bfloat16": before["step_seconds"], "few_bits": after["step_seconds"]}
    if pair.few_bits != FP8:
        return row
    return row | {"gathered": estimated((*pair.overrides, FP8, GATHERED))["step_seconds"]}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a row for each pair, with the published and the predicted ratio."""
    by_name, lines = (
        {row["name"]: row for row in rows},
        [
            "| pair | published | predicted | off | weights gathered in float8 | |",
            "|---|---|---|---|---|---|",
        ],
    )
    for pair in PAIRS:
        row = by_name.get(pair.name, {})
        if "few_bits" not in row:
            lines.append(f"| {pair.name} | {pair.ratio:.2f} | | | | {row.get('why_not', 'not estimated')} |")
            continue
        ratio = row["bfloat16"] / row["few_bits"]
        gathered = f"{row['bfloat16'] / row['gathered']:.2f}" if "gathered" in row else ""
        off = f"{ratio / pair.ratio - 1:+.0%} | {gathered} | {pair.note}"
        lines.append(f"| {pair.name} | {pair.ratio:.2f} | {ratio:.2f} | {off} |")
    return "\n".join(lines)


def gains(rows: Iterable[Mapping[str, Any]]) -> list[Run]:
    """Returns the estimated pairs as runs of low precision: the published over the predicted seconds of the step in few
    bits, if the step in bfloat16 is right."""
    by_name, runs = {row["name"]: row for row in rows if "few_bits" in row}, []
    for pair in PAIRS:
        if row := by_name.get(pair.name):
            off = round(row["bfloat16"] / row["few_bits"] / pair.ratio, 4)
            runs.append(Run(pair.name, pair.chip, pair.source, LOW_PRECISION, off, off))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", metavar="TEXT", help="only those with this text in their name")
    given = parser.parse_args()
    rows = {row["name"]: row for row in (read_lines(KEPT) if KEPT.exists() else [])}
    asked = [pair for pair in PAIRS if given.rows in pair.name]
    for at, pair in enumerate(asked):
        print(f"{at + 1} of {len(asked)}: {pair.name}", file=sys.stderr, flush=True)
        rows[pair.name] = predict(pair)
        KEPT.write_text("".join(json.dumps(rows[each.name]) + "\n" for each in PAIRS if each.name in rows))
    print(table(list(rows.values())))


if __name__ == "__main__":
    main()
