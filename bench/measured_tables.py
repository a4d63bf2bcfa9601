"""Writes the tables of measured times that prices rest on, from the measured operations in bench/measured.

    python bench/measured_tables.py                            # conf/calibration/_collectives.yaml and _matmuls.yaml
    python bench/measured_tables.py --nccl nccl_cost_model.py  # times across nodes, too, from NCCL's tuning

A table whose operations are not here stays as it is. `nccl_cost_model.py` is a file of meta-pytorch/autoparallel
(autoparallel/cost_models), which is not part of this repository.
"""

import argparse
import csv
import importlib
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from meshloom.compiler.spec.measured_tables import UNITS

MEASURED = Path(__file__).with_name("measured")
TABLES = Path(__file__).parents[1] / "conf" / "calibration"
MIB, GIB = 2**20, 2**30
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "send")
SOURCE = "openxla/xla, xla/service/gpu/model/{}_interpolator_data.h (February 2026), of XLA's own cost model"
# Links of one GPU, one way, and the largest array, of each chip whose collectives were measured behind its switch.
CHIPS = {"h100": ("4.5e+11", 2 * GIB), "b200": ("9.0e+11", 2 * GIB), "gb200": ("9.0e+11", 16 * GIB)}
SMALL = [2**14, *(2**power for power in range(16, 20))]  # sizes at which starts are noise
TYPES = {"bf16xbf16->bf16": "bfloat16", "f32xf32->f32": "float32"}  # all others are pairs of float8
Key = tuple[Any, ...]
Row = Mapping[str, str]


def group_of(row: Row) -> tuple[Any, int, int]:
    """Returns the kind of a measured collective, the GPUs of its group, and the GPUs that send at once.

    A permute is a ring, or pairs whose two GPUs both send. Where one GPU of each pair sends, it is a send.
    """
    if not row["pairs"]:
        near = int(float(row["devices_of_group"]))
        return row["collective"], near, near * int(float(row["groups_at_once"]))
    pairs = [tuple(map(int, pair.split(">"))) for pair in row["pairs"].split(";")]
    if not {sender for sender, _ in pairs} & {receiver for _, receiver in pairs}:
        return "send", 2, 2 * len(pairs)
    return row["collective"], 2 if pairs[0] == pairs[1][::-1] else len(pairs), len(pairs)


def matmul_of(row: Row) -> tuple[str, int, int]:
    """Returns the type, the contracted size, and the elements of the result, of a measured matmul."""
    batch, m, n, k = (int(row[name]) for name in ("batch", "m", "n", "k"))
    return TYPES.get(row["types"], "float8"), k, batch * m * n


def read(name: str) -> list[dict[str, str]]:
    """Returns the rows of a file of measured operations."""
    with (MEASURED / name).open() as file:
        return list(csv.DictReader(file))


def collectives(chip: str, operations: Iterable[Row]) -> list[str]:
    """Returns the table of a chip, from these operations: each measured size, and each group with the GPUs that sent at
    once where there are several numbers of them."""
    rate, most = CHIPS[chip]
    found: dict[Key, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in operations:
        if row["chip"] == chip:
            found[group_of(row)][int(row["bytes_of_whole_array"])].append(float(row["microseconds"]))
    measured = {size for times in found.values() for size in times}
    sizes = SMALL + sorted(size for size in measured if MIB <= size <= most)
    several = len({at_once for _, _, at_once in found}) > 1
    lines = [f"  chip_bytes_per_second: {rate}", f"  bytes: {' '.join(map(_size, sizes))}", "  microseconds:"]
    for kind in KINDS:
        groups = sorted((near, at_once) for of, near, at_once in found if of == kind)
        lines += [f"    {kind}:"] if groups else []
        for near, at_once in groups:
            name = f"{near}/{at_once}" if several else str(near)
            lines.append(f"      {name}: {_line(_at(found[kind, near, at_once], sizes))}")
    return lines


def _at(times: Mapping[int, list[float]], sizes: Sequence[int]) -> Iterator[float]:
    """Yields the times of sizes, between those that were measured. A small array takes no longer than a large one."""
    known = sorted(times)
    most = min(median(times[size]) for size in known if size >= MIB)
    for size in sizes:
        high = next((each for each in known if each >= size), known[-1])
        low = max((each for each in known if each <= size), default=high)
        share = (math.log(size) - math.log(low)) / (math.log(high) - math.log(low)) if high > low else 0.0
        time = median(times[low]) ** (1 - share) * median(times[high]) ** share
        yield min(time, most) if size < MIB else time


def matmuls(chip: str, operations: Iterable[Row]) -> list[str]:
    """Returns the table of a chip, from these operations: the median of the shapes with the same contracted size and
    elements of the result."""
    found: dict[Key, list[float]] = defaultdict(list)
    for row in operations:
        if row["chip"] == chip:
            found[matmul_of(row)].append(float(row["microseconds"]))
    results = sorted({size for _, _, size in found})
    lines = [f"  results: {' '.join(map(_size, results))}", "  microseconds:"]
    for dtype in dict.fromkeys(dtype for dtype, _, _ in found):
        depths = sorted({k for of, k, _ in found if of == dtype})
        rows = (f"      {k}: {_line(median(found[dtype, k, size]) for size in results)}" for k in depths)
        lines += [f"    {dtype}:", *rows]
    return lines


def across_nodes(path: Path) -> list[str]:
    """Returns the table of groups over several nodes of 8 H100, as NCCL's tuning has it."""
    sys.path.insert(0, str(path.parent))
    model: Any = importlib.import_module(path.stem)
    config = model.NCCLTopoConfig(model.GpuArch.HOPPER, 32, 8, 320.0, 50.0, has_nvswitch=True)
    sizes = [2**power for power in range(16, 33, 2)]
    lines = ["  chip_bytes_per_second: 5.0e+10    # of a GPU into the network, one way",
             f"  bytes: {' '.join(map(_size, sizes))}", "  microseconds:"]  # fmt: skip

    def group(nodes: int, near: int) -> Any:
        return model.MeshDimTopo(nodes * near, nodes, near, 320 / 16, 50 / 16, 16)

    for kind, name in (("all-gather", "ALLGATHER"), ("all-reduce", "ALLREDUCE")):
        lines.append(f"    {kind}:")
        for nodes in (2, 4, 8, 16, 32):
            for near in (1, 2, 4, 8):
                took = (
                    model.nccl_collective_time(model.NCCLFunc[name], size, group(nodes, near), config) for size in sizes
                )
                # It sums arrays faster than the adapters of a node carry them, which reach 0.96 of their rate.
                carried = 2e6 * (nodes - 1) / nodes / (near * 50e9 * 0.96) if kind == "all-reduce" else 0.0
                times = (max(time, size * carried) for time, size in zip(took, sizes, strict=True))
                lines.append(f"      {nodes}x{near}: {_line(accumulate(times, max))}")
    lines.append("    all-to-all:")
    for nodes in (2, 4, 8, 16, 32):
        times = (model.nccl_all_to_all_cost(size, group(nodes, 8), config) for size in sizes)
        lines.append(f"      {nodes}x8: {_line(accumulate(times, max))}")
    # Half of an exchange over two nodes crosses the network.
    pair = (model.nccl_all_to_all_cost(2 * size, group(2, 8), config) for size in sizes)
    return [
        *lines,
        "    collective-permute:             # a pair, as an exchange over two nodes",
        f"      2x1: {_line(pair)}",
    ]


def _size(size: int) -> str:
    unit = next(name for name in ("Gi", "Mi", "Ki", "") if size % UNITS[name] == 0)
    return f"{size // UNITS[unit]}{unit}"


def _line(times: Iterator[float]) -> str:
    return " ".join(
        f"{time:.3g}" if time < 1000 else f"{time:.4g}" if time < 10_000 else f"{time:.0f}" for time in times
    )


def with_tables(text: str, tables: Mapping[str, Sequence[str]]) -> str:
    """Returns the text of a file with the given tables in place of those of the same names."""
    for name, lines in tables.items():
        body = "\n".join([f"{name}:", *lines]) + "\n"
        text, count = re.subn(rf"^{name}:\n(?:[ #].*\n)*", lambda _, body=body: body, text, flags=re.M)
        assert count == 1, name
    return text


def files(nccl: Path | None = None) -> dict[Path, str]:
    """Returns the text of each file of tables. nccl: the file with NCCL's tuning; None: its table stays."""
    of_switches = SOURCE.format("collective") + "; below 1 MiB at most what 1 MiB takes"
    of_matmuls = SOURCE.format("matmul") + ": the median of the shapes with this many results"
    across = (
        "meta-pytorch/autoparallel, cost_models/nccl_cost_model.py: the tuning of NCCL 2.27 on H100 with corrections "
        "fitted to nccl-tests over 2 to 32 nodes"
    )
    moved, multiplied = read("gpu_collectives.csv"), read("gpu_matmuls.csv")
    tables: dict[str, dict[str, list[str]]] = {
        "_collectives.yaml": {chip: [f'  source: "{of_switches}"', *collectives(chip, moved)] for chip in CHIPS},
        "_matmuls.yaml": {chip: [f'  source: "{of_matmuls}"', *matmuls(chip, multiplied)] for chip in ("h100", "b200")},
    }
    if nccl:
        tables["_collectives.yaml"]["across_nodes"] = [f'  source: "{across}"', *across_nodes(nccl)]
    return {TABLES / name: with_tables((TABLES / name).read_text(), of) for name, of in tables.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nccl", type=Path, metavar="FILE", help="nccl_cost_model.py: write times across nodes, too")
    for path, text in files(parser.parse_args().nccl).items():
        path.write_text(text)


if __name__ == "__main__":
    main()
