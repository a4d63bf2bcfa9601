"""Tables of declarations that are estimated or compiled, a row for each, for hardware that need not be there.

    pip install -e '.[tpu]' && pip install 'jax[cuda13]' && python bench/rows.py NAME [--rows TEXT] [--show] [FILE]

`--help` lists the names. A row that is estimated takes seconds, one that is compiled minutes; each is kept in
bench/NAME.jsonl (compiled_rows.py).
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from compiled_rows import (
    NOT_COMPILED,
    SUMS,
    Cell,
    Facts,
    Overrides,
    Rows,
    Table,
    add_options,
    compile_report,
    compiled,
    estimated,
    fitting,
    gib,
    kept_rows,
    make_rows,
    markdown,
    memory,
    percent,
    read_kept,
    short_seconds,
    step,
)

from meshloom.compiler.core.partition_spec import STAGE
from meshloom.compiler.pipeline.buffers import LoweredTable, lower_table
from meshloom.compiler.pipeline.schedules import build_table
from meshloom.compiler.pipeline.table import TickForm

# Experts: what of their exchanges stays exposed. Two layers with experts, as all are the same.

COMMON: Overrides = ("sharding=fsdp_expert", "moe.max_imbalance=2", "data=synthetic", "remat=full", "overlap=prefetch")
MIXTRAL: Overrides = (
    "model=mixtral_8x7b", "model.num_layers=2", "target=v5p-128", "sharding=fsdp_expert", "mesh.fsdp=16",
    "mesh.expert=4", "moe.max_imbalance=2", "global_batch_size=256", "sequence_length=2048", "data=synthetic",
    "remat=full", "overlap=prefetch",
)  # fmt: skip
QWEN3: Overrides = (
    "model=qwen3_30b_a3b", "model.num_layers=2", "target=v6e-256", "mesh.fsdp=32", "mesh.expert=8",
    "global_batch_size=512", "sequence_length=4096", *COMMON,
)  # fmt: skip
DEEPSEEK: Overrides = (  # a dense layer and two with experts
    "model=deepseek_v3", "model.num_layers=3", "model.num_dense_layers=1", "target=v5p-2048", "mesh.fsdp=32",
    "mesh.expert=32", "global_batch_size=4096", "sequence_length=4096", *COMMON,
)  # fmt: skip
CHUNKS: Overrides = ("overlap.flag_presets=[sparse_core,async_exchange]", "moe.num_chunks=2")
HALVES: Overrides = (  # of a device's sequences, instead of chunks of its tokens
    "overlap.flag_presets=[sparse_core,async_exchange]", "overlap.layers.batch_split=2",
)  # fmt: skip
EXPERTS = Table(
    {
        "ragged": (*MIXTRAL, "overlap.flag_presets=[sparse_core]", "parallel.experts=ragged"),
        "ragged, 2 chunks": (*MIXTRAL, *CHUNKS, "parallel.experts=ragged"),
        "padded, 2 chunks": (*MIXTRAL, *CHUNKS, "parallel.experts=padded"),
        "gathered, 2 chunks": (*MIXTRAL, *CHUNKS, "parallel.experts=gathered"),
        "qwen3, gathered": (*QWEN3, *CHUNKS, "parallel.experts=gathered"),
        "deepseek, gathered": (*DEEPSEEK, *CHUNKS, "parallel.experts=gathered"),
        "deepseek, gathered, batch split": (*DEEPSEEK, *HALVES, "parallel.experts=gathered"),
    },
    "exchange",
    {
        "exchanges exposed": lambda row: f"{row['exposed_over'].get('expert', 0.0) * 1e3:.1f} ms",
        "step": lambda row: f"{row['predicted_seconds'] * 1e3:,.0f} ms",
        "all exposed": percent("exposed_fraction"), "MFU": percent("predicted_mfu"), "peak": memory,
    },
)  # fmt: skip


# Models of experts, cut to eight layers: what is estimated, and what is compiled at the same prices. With two layers,
# half of the gathers and sums of weights are the first or the last of their loops, which nothing hides.

EIGHT_LAYERS: Overrides = (
    "model.num_layers=8", "sequence_length=4096", "data=synthetic", "remat=full", "sharding=fsdp_expert",
)  # fmt: skip
EXPERTS_ALONE: Overrides = ("model=deepseek_v3", "model.num_dense_layers=0", "model.dense_mlp_dim=null")
EXPERT_CUTS = Table(
    {
        "qwen3_30b_a3b, h100-8, expert 8, 8 sequences": (
            "model=qwen3_30b_a3b", *EIGHT_LAYERS, "target=h100-8", "mesh.expert=8", "global_batch_size=64",
        ),
        "mixtral_8x22b, h100-64, fsdp 8 x expert 8, 2 sequences": (
            "model=mixtral_8x22b", *EIGHT_LAYERS, "target=h100-64", "mesh.fsdp=8", "mesh.expert=8",
            "global_batch_size=128",
        ),
        "mixtral_8x22b, h100-64, likewise, `prefetch` and `pipelined`": (
            "model=mixtral_8x22b", *EIGHT_LAYERS, "target=h100-64", "mesh.fsdp=8", "mesh.expert=8",
            "global_batch_size=128", "overlap=prefetch", "overlap.flag_presets=[pipelined]",
        ),
        "deepseek_v3, tpu7x-256, fsdp 32 x expert 8, 2 sequences": (
            *EXPERTS_ALONE, *EIGHT_LAYERS, "target=tpu7x-256", "mesh.fsdp=32", "mesh.expert=8",
            "global_batch_size=512", "overlap=prefetch",
        ),
        "deepseek_v3, v5p-1024, fsdp 64 x expert 8, 1 sequence": (
            *EXPERTS_ALONE, *EIGHT_LAYERS, "target=v5p-1024", "mesh.fsdp=64", "mesh.expert=8",
            "global_batch_size=512", "overlap=prefetch",
        ),
    },
    "8 layers, 4,096 tokens, `remat=full`",
    {
        "compiled": lambda row: _milliseconds(row, "predicted_seconds"),
        "estimated": lambda row: _milliseconds(row, "estimated_step"),
        "estimated / compiled": lambda row: f"{row['estimated_step'] / row['predicted_seconds'] - 1:+.0%}",
        "compute": lambda row: _both(row, "compute"), "exposed": lambda row: _both(row, "exposed"),
    },
)  # fmt: skip


def _milliseconds(row: Facts, key: str) -> str:
    return f"{row[key] * 1e3:,.0f} ms"


def _both(row: Facts, part: str) -> str:
    return f"{_milliseconds(row, f'{part}_seconds')}, {_milliseconds(row, f'estimated_{part}')}"


# Pipelines of four stages with each schedule: Llama 3 70B with 8,192 tokens on 128 chips of v5p, on 256 H100, and on
# four slices of v5p with a stage on each; a cut of Llama 3 405B as it ran on 8,192 H100; and layers of Llama 3 8B
# without recomputation, two on a stage.

STAGED: Overrides = (
    "sharding=fsdp_tensor", "sequence_length=8192", "data=synthetic", "remat=full", "mesh.stage=4", "overlap=xla",
    "on_out_of_memory=try",
)  # fmt: skip
PLACES: dict[str, Overrides] = {
    "v5p": ("target=v5p-256", "mesh.fsdp=8", "mesh.tensor=4"),
    "h100": ("target=h100-256", "mesh.fsdp=8", "mesh.tensor=8"),
    "over DCN": ("target=v5p-64", "target.num_slices=4", "mesh.fsdp=8", "mesh.tensor=4"),
}
CUT: Overrides = (
    "model=llama3_405b", "model.num_layers=32", *STAGED, "target=h100-64", "mesh.fsdp=2", "mesh.tensor=8",
    "num_microbatches=16", "global_batch_size=32",
)  # fmt: skip
SAVED: Overrides = (
    "model=llama3_8b", "model.num_layers=8", "model.vocab_size=8192", "sharding=fsdp", "sequence_length=4096",
    "data=synthetic", "remat=none", "mesh.stage=4", "mesh.fsdp=2", "overlap=xla", "on_out_of_memory=try",
    "target=v5p-16", "num_microbatches=16", "global_batch_size=32",
)  # fmt: skip
PIPELINES = Table(
    {
        f"{place}, {schedule}, 16": (
            "model=llama3_70b", *STAGED, *overrides, f"pipeline={schedule}", "num_microbatches=16",
            "global_batch_size=128",
        )
        for schedule in ("1f1b", "interleaved_1f1b", "zb_v", "gpipe", "zb_h1", "dualpipe_v")
        for place, overrides in PLACES.items()
    } | {
        "h100, cut of 405B, 1f1b, 16": (*CUT, "pipeline=1f1b"),
        "h100, cut of 405B, interleaved_1f1b of 8 chunks, 16": (
            *CUT, "pipeline=interleaved_1f1b", "pipeline.num_chunks=8",
        ),
    } | {
        f"v5p, 8B without recomputation, {schedule} in {form} ticks, 16": (
            *SAVED, f"pipeline={schedule}", f"pipeline.ticks={form}",
        )
        for schedule, form in (
            ("1f1b", "multi"), ("1f1b", "unit"), ("zb_h1", "unit"), ("zb_h2", "multi"), ("zb_v", "unit"),
        )
    },
    "place, schedule, microbatches",
    {
        "bubble": percent("bubble_fraction"), "exposed": percent("exposed_fraction"), "step": step,
        "MFU": percent("predicted_mfu"), "memory of a chip": memory,
    },
)  # fmt: skip


# 1F1B against GPipe: how much more memory a chip takes, by the slots of the tables and compiled. Four layers of width
# 512 over four stages: a slot holds the input of a chunk and of its one layer, or a gradient of its result.

STAGES, WIDTH, LENGTH, SEQUENCES = 4, 512, 2048, 2  # sequences of a microbatch on a chip
SMALL: Overrides = (
    "model=tiny", f"model.embed_dim={WIDTH}", "model.num_heads=4", "model.num_kv_heads=4", "model.head_dim=128",
    "model.mlp_dim=1024", "target=v5p-16", f"mesh.stage={STAGES}", "mesh.fsdp=2", "sharding=fsdp", "data=synthetic",
    "remat=full", "overlap=xla", f"sequence_length={LENGTH}",
)  # fmt: skip
SHAPES = {f"{schedule}, {number}": (schedule, number) for schedule in ("1f1b", "gpipe") for number in (8, 16)}


def _lowered(name: str) -> LoweredTable:
    schedule, number = SHAPES[name]
    return lower_table(build_table(schedule, STAGES, 1, number, TickForm.MULTI))


def _slots(kept: Rows) -> str:
    found = dict(kept_rows(PIPELINES_MEMORY.rows, kept))
    first = next(iter(found), "")
    x = SEQUENCES * LENGTH * WIDTH * 2  # bytes of the input of a layer, in bfloat16
    held = {name: x * (2 * _lowered(name).num_x + _lowered(name).num_gradients) for name in found}
    cells = (
        [name, f"{_lowered(name).num_x}, {_lowered(name).num_gradients}", *(f"{each / 2**20:.1f} MiB" for each in (
            row["peak_bytes"], held[name] - held[first], row["peak_bytes"] - found[first]["peak_bytes"],
        ))]
        for name, row in found.items()
    )  # fmt: skip
    return markdown(("schedule, microbatches", "slots of inputs, gradients", "memory of a chip",
                     f"more than {first}, by slots", "compiled"), cells)  # fmt: skip


PIPELINES_MEMORY = Table(
    {
        name: (
            *SMALL, f"pipeline={schedule}", "pipeline.ticks=multi", f"num_microbatches={number}",
            f"global_batch_size={2 * SEQUENCES * number}",
        )
        for name, (schedule, number) in SHAPES.items()
    },
    table=_slots,
)  # fmt: skip


# Pipelines that others ran on H100: Llama 3 405B (arXiv:2407.21783, section 3.3.2 and table 4) and torchtitan's runs of
# it (benchmarks/llama3_h100_202412_torchtitan.md). docs/results/published_pipelines.md says in what a row differs.

# torchtitan's 1f1b runs as in ticks of two operations; ticks of one, which `auto` chooses, are shorter and do not fit.
MULTI = "pipeline.ticks=multi"
GRAND_TETON = ("target.chip.hbm_bytes_per_second=2.4e12", "target.chip.power_limit_watts=500")
ONE_CHUNK, EIGHT_CHUNKS = ("pipeline=1f1b",), ("pipeline=interleaved_1f1b", "pipeline.num_chunks=8")
TWO_CHUNKS = ("pipeline=interleaved_1f1b", "pipeline.num_chunks=2")
ALONE = f"pipeline.layers=[0{',1' * 126},0]"  # 126 layers in 128 parts: the first has the embedding, the last the head
H100: Overrides = (
    "model=llama3_405b", "sharding=fsdp_tensor", "mesh.tensor=8", "sequence_length=8192", "data=synthetic",
)  # fmt: skip


def _llama(num_gpus: int, schedule: Overrides, remat: str) -> tuple[str, Overrides]:
    """Returns a run of Llama 3 405B: 2,048 sequences over 16 stages, one in a microbatch."""
    replicas = num_gpus // 128
    chosen = (
        f"target=h100-{num_gpus}", "mesh.stage=16", f"mesh.fsdp={replicas}", "global_batch_size=2048",
        f"num_microbatches={2048 // replicas}", f"remat={remat}", *schedule,
        *((ALONE,) if schedule == EIGHT_CHUNKS else ()),
    )  # fmt: skip
    return f"405B, {num_gpus:,} GPUs, remat {remat}, {_named(schedule)}", (*H100, *chosen)


def _torchtitan(schedule: Overrides) -> tuple[str, Overrides]:
    """Returns a run of torchtitan: 256 sequences over 8 stages, as many microbatches as stages, its default."""
    chosen = (
        "target=h100-512", "mesh.stage=8", "mesh.fsdp=8", "global_batch_size=256", "num_microbatches=8", "remat=full",
        *schedule, MULTI, *GRAND_TETON,
    )  # fmt: skip
    return f"torchtitan 405B, 512 GPUs, {_named(schedule)}", (*H100, *chosen)


def _named(schedule: Overrides) -> str:
    return ", ".join(word.split("=")[1] for word in schedule)


RUNS = {  # with what is published, in TFLOP/s of a GPU, or tokens per second and GPU
    _llama(8192, EIGHT_CHUNKS, "none"): "430 TFLOP/s", _llama(16384, EIGHT_CHUNKS, "none"): "400 TFLOP/s",
    **{_llama(size, EIGHT_CHUNKS, remat): "" for remat in ("minimal", "save_dots", "full") for size in (8192, 16384)},
    **{_llama(number, ONE_CHUNK, "full"): "" for number in (8192, 16384)},
    _torchtitan(ONE_CHUNK): "100 tokens/s, float8", _torchtitan(TWO_CHUNKS): "128 tokens/s, float8",
}  # fmt: skip
PUBLISHED = {name: published for (name, _), published in RUNS.items()}


def _share_over(axis: str) -> Cell:
    return lambda row: f"{row['exposed'].get(axis, 0.0) / row['step_seconds']:.1%}"


def _of_gpu(row: Facts, key: str) -> float:
    return row[key] / row["step_seconds"] / row["num_chips"]


PUBLISHED_PIPELINES = Table(
    dict(RUNS.keys()),
    "run",
    {
        "published": lambda row: PUBLISHED[row["name"]],
        "estimated": lambda row: f"{_of_gpu(row, 'flops') / 1e12:.0f} TFLOP/s",
        "tokens/s": lambda row: f"{_of_gpu(row, 'tokens'):.0f}",
        "step": lambda row: f"{row['step_seconds']:.2f} s",
        "bubble": lambda row: f"{row['bubble_seconds'] / row['step_seconds']:.1%}",
        "over tensor": _share_over("tensor"), "over fsdp": _share_over("fsdp"), "over stage": _share_over(STAGE),
        "memory of a GPU": lambda row: memory(row) + (
            "" if row["peak_bytes"] <= row["limit_bytes"] else ", does not fit"
        ),
    },
    is_estimated=True,
)  # fmt: skip


# Ring, all-gather and Ulysses by the length of sequences, on three machines of 64 chips; compiled with two layers.

TARGETS = ("v5p-128", "v6e-64", "h100-64")
LENGTHS = {32_768: 8, 131_072: 8, 524_288: 32}  # tokens, and the devices that share a sequence
STRATEGIES = ("ring", "all_gather", "ulysses")
LONG: Overrides = ("model=llama3_8b", "sharding=fsdp_context", "remat=full", "overlap=prefetch", "data=synthetic")


def _long(target: str, length: int, strategy: str) -> Overrides:
    context = LENGTHS[length]
    mesh = (f"mesh.fsdp={64 // context}", f"mesh.context={context}", f"global_batch_size={64 // context}")
    return (*LONG, f"target={target}", *mesh, f"sequence_length={length}", f"parallel.context={strategy}")


def _by_strategy(cells: Callable[[Facts], list[str]], cut: Overrides = ()) -> Callable[[Rows], str]:
    """Returns what prints a table with three columns for each strategy."""

    def of(kept: Rows, target: str, length: int) -> Iterator[str]:
        for one in STRATEGIES:
            row = kept.get((*_long(target, length, one), *cut))
            yield from ["", "", ""] if row is None else [row["why_not"], "", ""] if row.get("why_not") else cells(row)

    heads = [f"{one}: step" if name == "step" else name for one in STRATEGIES for name in ("step", "exposed", "peak")]
    places = [*product(TARGETS, LENGTHS)]
    return lambda kept: markdown(
        ["chips", "tokens", *heads],
        ([target, f"{length // 1024}k", *of(kept, target, length)] for target, length in places),
    )


def _long_estimate(row: Facts) -> list[str]:
    """exposed: the share of the step that waits for keys, values or heads."""
    share = row["exposed"].get("context", 0.0) / row["step_seconds"]
    return [f"{row['step_seconds']:.3g} s", f"{100 * share:.1f} %", fitting(row, " GiB")]


def _long_compiled(row: Facts) -> list[str]:
    """exposed: all communication."""
    return [*(f"{row[key] * 1e3:.1f} ms" for key in ("predicted_seconds", "exposed_seconds")), memory(row)]


TWO_LAYERS: Overrides = ("model.num_layers=2",)
LONG_ROWS = {f"{target}, {n // 1024}k, {one}": _long(target, n, one)
             for target, n, one in product(TARGETS, LENGTHS, STRATEGIES)}  # fmt: skip
CONTEXT = Table(LONG_ROWS, table=_by_strategy(_long_estimate), is_estimated=True)
CONTEXT_COMPILED = Table(
    {name: (*overrides, *TWO_LAYERS) for name, overrides in LONG_ROWS.items()},
    table=_by_strategy(_long_compiled, TWO_LAYERS),
)


# LoRA and DoRA against full fine-tuning of Llama 3: first where both fit, then where LoRA alone does.

FULL, LORA, DORA = "full", "lora", "dora"
CELLS = [
    *product((("llama3_8b", "v5e-16", 16), ("llama3_70b", "v5p-64", 32), ("llama3_405b", "v5p-512", 256)),
             (FULL, LORA, DORA)),
    *product((("llama3_8b", "v5e-4", 4), ("llama3_70b", "v5p-16", 8), ("llama3_405b", "v5p-64", 32)), (FULL, LORA)),
]  # fmt: skip
TUNED: dict[str, Overrides] = {
    f"{model}, {target}, {kind}": (
        "sharding=fsdp", "remat=full", "overlap=prefetch", "data=synthetic", "sequence_length=8192", f"model={model}",
        f"target={target}", f"global_batch_size={chips}", *(() if kind == FULL else (f"adapter={kind}",)),
    )
    for (model, target, chips), kind in CELLS
}  # fmt: skip
MODEL_AND_CHIPS = "model | chips | trains"


def _held(part: str) -> Cell:
    def cell(row: Facts) -> str:
        held = {"base": row["breakdown"].get("parameters", 0), "adapters": 0} | row["breakdown"]
        return "not known" if held[part] is None else gib(held[part])

    return cell


def _moved(kind: str) -> Cell:
    def cell(row: Facts) -> str:
        count, size = row["kinds"].get(kind, (0, 0))
        return f"{gib(size)} in {count:,}" if count else ""

    return cell


def _in_gib(*keys: str) -> dict[str, Cell]:
    return {key: lambda row, key=key: gib(row[key]) for key in keys}


ADAPTERS = Table(
    {name.replace(", ", " | "): overrides for name, overrides in TUNED.items()},
    MODEL_AND_CHIPS,
    {
        "trained": lambda row: f"{row['num_trained'] / 1e6:,.0f} M", **_in_gib("base", "adapters", "optimizer"),
        "peak": fitting, **_in_gib("gathered", "reduced"), "step": short_seconds("step_seconds"),
    },
    is_estimated=True,
)  # fmt: skip
ADAPTERS_COMPILED = Table(
    {name.replace(", ", " | "): overrides for name, overrides in TUNED.items() if not name.endswith(DORA)},
    MODEL_AND_CHIPS,
    {
        **{part: _held(part) for part in ("base", "adapters", "optimizer", "gradients")}, "peak": fitting,
        **{kind: _moved(kind) for kind in ("all-gather", *SUMS)},
        "sums of the base": lambda row: gib(row["of_base"]) if row["fits"] else "",
        "step": short_seconds("predicted_seconds"),
    },
)  # fmt: skip


# QLoRA of Llama 3 where full fine-tuning and LoRA do not fit, or nearly: all layers, a sequence of 4,096 a chip.

QLORA_CELLS = (("llama3_70b", "v5e-16", 16), ("llama3_8b", "h100-1", 1), ("llama3_405b", "h100-16", 16))
QLORA = Table(
    {
        f"{model} | {target}": (
            "sharding=fsdp", "remat=full", "overlap=prefetch", "data=synthetic", "sequence_length=4096",
            f"model={model}", f"target={target}", f"global_batch_size={chips}", "adapter=qlora",
        )
        for model, target, chips in QLORA_CELLS
    },
    "model | chips",
    {
        **{part: _held(part) for part in ("base", "adapters", "optimizer", "gradients")}, "peak": fitting,
        "all-gather": _moved("all-gather"), "exposed": percent("exposed_fraction"),
        "step": short_seconds("predicted_seconds"), "estimated step": short_seconds("estimated_step"),
        "MFU": percent("predicted_mfu"),
    },
)  # fmt: skip


# What `overlap=none`, `xla` and `auto` expose of a step, and its predicted time, by one simulator.

MODES = ("none", "xla", "auto")
TENSOR: Overrides = ("sharding=fsdp_tensor", "mesh.tensor=4")
STACK: Overrides = ("model.embed_dim=8192", "model.num_layers=16")
OVERLAPPED: tuple[tuple[str, str, int, int, int, Overrides, int], ...] = (
    # model, target, chips, sequences of a chip, length, what differs from FSDP, candidates of auto
    ("llama2_7b", "v5e-256", 256, 4, 4096, (), 4),
    ("llama3_8b", "v5p-128", 64, 4, 4096, (), 4),
    ("llama3_8b", "v6e-64", 64, 4, 4096, (), 4),
    ("llama3_8b", "h100-64", 64, 2, 4096, (), 12),
    ("llama3_70b", "v5p-512", 256, 2, 4096, (), 4),
    ("llama3_70b", "v5p-512", 256, 2, 4096, TENSOR, 4),
    ("llama3_70b", "h100-512", 512, 2, 4096, (), 12),
    # 16,384 tokens of a chip hide the matrices that cross meanwhile, 512 nearly, 128 cannot
    ("linear_stack", "v5p-128", 64, 4, 4096, STACK, 4),
    ("linear_stack", "v5p-128", 64, 1, 512, STACK, 4),
    ("linear_stack", "v5p-128", 64, 1, 128, STACK, 4),
    ("llama2_7b", "v5e-64", 64, 4, 2048, (), 4),
    ("llama3_8b", "v5p-128", 64, 4, 2048, (), 4),
    ("llama3_8b", "v6e-64", 64, 4, 2048, (), 4),
    ("llama2_70b", "v5p-256", 128, 2, 2048, (), 4),
    ("llama2_70b", "v5p-256", 128, 2, 2048, TENSOR, 4),
)


def overlap_rows() -> Iterator[tuple[str, str, Overrides]]:
    """Yields the name of a row, the mode and the overrides."""
    for mode in reversed(MODES):  # the baseline last
        for model, target, chips, sequences, length, others, num_candidates in OVERLAPPED:
            split = "FSDP + tensor 4" if others == TENSOR else "FSDP"
            sharding, changed = (TENSOR, ()) if others == TENSOR else (("sharding=fsdp",), others)
            search = (f"overlap.search.max_candidates={num_candidates}",) if mode == "auto" else ()
            yield f"{model}, {target}, {split}, {sequences} x {length}", mode, (
                f"model={model}", f"target={target}", *sharding, "remat=full",
                "precision.gradient_reduction=bfloat16", "data=synthetic", *changed,
                f"global_batch_size={sequences * chips}", f"sequence_length={length}", f"overlap={mode}", *search,
            )  # fmt: skip


def _modes(kept: Rows) -> str:
    found = dict[str, dict[str, Facts]]()
    for name, mode, overrides in overlap_rows():
        if overrides in kept:
            found.setdefault(name, {})[mode] = kept[overrides]
    names = dict.fromkeys(name for name, *_ in overlap_rows())
    columns = ("model, target, sharding, sequences x length of a chip", *MODES, "chosen", "link / compute")
    return markdown(columns, (_compared(name, found[name]) for name in names if "auto" in found.get(name, {})))


def _compared(name: str, by_mode: Mapping[str, Facts]) -> list[str]:
    auto = by_mode["auto"]
    chosen = auto["tried"][auto["chosen"]]
    chosen = {"peak_bytes": chosen.get("peak_bytes_per_chip")} | chosen  # the name in rows of an older version
    share = auto["link_seconds"] / auto["compute_seconds"] if auto["compute_seconds"] else 0.0
    return [name, *map(figures, (by_mode.get("none"), by_mode.get("xla"), chosen)), chosen["name"], f"{share:.2f}"]


def figures(one: Facts | None) -> str:
    if one is None:
        return NOT_COMPILED
    if one["predicted_seconds"] is None:
        return "does not fit" if one["fits"] is False else one.get("why_not") or "not known"
    return f"{one['exposed_fraction']:.1%}, {one['predicted_seconds']:.3g} s, {gib(one['peak_bytes'])} GiB"


OVERLAP = Table({f"{name}, {mode}": overrides for name, mode, overrides in overlap_rows()}, table=_modes)

TABLES: dict[str, Table] = {
    "experts": EXPERTS, "expert_cuts": EXPERT_CUTS,
    "pipelines_compiled": PIPELINES, "pipelines_memory": PIPELINES_MEMORY,
    "published_pipelines": PUBLISHED_PIPELINES, "context": CONTEXT, "context_compiled": CONTEXT_COMPILED,
    "adapters": ADAPTERS, "adapters_compiled": ADAPTERS_COMPILED, "qlora": QLORA, "overlap": OVERLAP,
}  # fmt: skip


def printed(name: str) -> str:
    """Returns the table of what is kept."""
    return TABLES[name].markdown(read_kept(kept_of(name)))


def kept_of(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.jsonl")


def main(words: Sequence[str] | None = None) -> int:
    """Returns 1 if a row could not be compiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=TABLES)
    add_options(parser, None)
    given = parser.parse_args(words)
    given.file = given.file or kept_of(given.name)
    chosen = TABLES[given.name]
    rows: Iterable[tuple[str, Overrides]] = chosen.rows.items()
    if chosen.is_estimated:
        num_missing = make_rows(given, rows, dict, make=lambda overrides: (estimated(overrides), None))
    else:
        num_missing = make_rows(given, rows, compiled, make=compile_report)
    print(chosen.markdown(read_kept(given.file)))
    return int(num_missing > 0)


if __name__ == "__main__":
    sys.exit(main())
