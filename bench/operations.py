"""Prices operations that others measured on real chips, and says how far off each price is.

    python bench/operations.py              # tables of errors, by kind and size, in Markdown
    python bench/operations.py --all        # every operation, one a line
    python bench/operations.py --picture docs/results/operations.svg

bench/measured has the operations (bench/README.md says where from). Prices are those of an idle chip: without
`sustained`, which is the load of a whole run.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, median

from measured_tables import Row, group_of, matmul_of, read

from meshloom.compiler.spec.measured_tables import CollectiveTable, MatmulTable
from meshloom.compiler.spec.target_names import chip_file
from meshloom.compiler.spec.target_spec import SwitchSpec
from meshloom.compiler.target.matmul_times import MatmulTimes
from meshloom.compiler.target.switch import SwitchTimes

MIB = 2**20
BANDS = ((1, 8, "1 to 8 MiB"), (8, 64, "8 to 64 MiB"), (64, 512, "64 to 512 MiB"), (512, math.inf, "from 512 MiB"))


@dataclass(frozen=True)
class Priced:
    """A measured operation with its price, in seconds. band: the size that a table has a column for."""

    chip: str
    kind: str
    group: str
    band: str
    measured: float
    price: float

    @property
    def error(self) -> float:
        return self.price / self.measured - 1


@cache
def _times(chip: str, near: int, at_once: int, own: CollectiveTable | None) -> SwitchTimes:
    network = chip_file(chip)[1]
    assert isinstance(network, SwitchSpec)
    rates = network.chip_bytes_per_second, network.nic_bytes_per_second
    return SwitchTimes(near, 1, *rates, own or network.collectives, network.across, at_once)


def collectives(rows: Iterable[Row] | None = None, own: CollectiveTable | None = None) -> Iterator[Priced]:
    """Yields collectives of GPUs behind one switch, from 1 MiB on. rows: of all that were measured. own: a table in
    place of their chip's."""
    for row in read("gpu_collectives.csv") if rows is None else rows:
        if (size := float(row["bytes_of_whole_array"])) < MIB:
            continue
        kind, near, at_once = group_of(row)
        full = size * near if kind == "all-to-all" else size  # its row says a device's own array
        price = _times(row["chip"], near, at_once, own).seconds(kind, full)
        band = next(name for low, high, name in BANDS if low * MIB <= size < high * MIB)
        yield Priced(row["chip"], kind, f"{near}/{at_once}", band, float(row["microseconds"]) * 1e-6, price)


def matmuls(rows: Iterable[Row] | None = None, own: MatmulTable | None = None) -> Iterator[Priced]:
    """Yields matmuls of GPUs. rows: of all that were measured. own: a table in place of their chip's."""
    for row in read("gpu_matmuls.csv") if rows is None else rows:
        table = own or chip_file(row["chip"])[0].matmuls
        assert table is not None
        dtype, depth, results = matmul_of(row)
        flops = 2.0 * depth * results
        price = float(MatmulTimes(table).seconds(dtype, flops, results))
        band = f"10^{math.floor(math.log10(flops))} FLOP"
        yield Priced(
            row["chip"],
            dtype,
            "x".join(row[name] for name in ("batch", "m", "n", "k")),
            band,
            float(row["microseconds"]) * 1e-6,
            price,
        )


def table(found: Sequence[Priced], average: Callable[[Sequence[float]], float]) -> str:
    """Returns the errors by chip and kind, with a column for each band: without signs averaged, and the worst."""
    bands = list(dict.fromkeys(each.band for each in sorted(found, key=lambda each: each.measured)))
    rows: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in found:
        rows[each.chip, each.kind][each.band].append(each.error)
    lines = [f"| chip | kind | {' | '.join(bands)} |", f"|{'---|' * (2 + len(bands))}"]
    for (chip, kind), of in rows.items():
        cells = [
            f"{average([abs(one) for one in of[band]]):.1%} ({max(of[band], key=abs):+.0%})" if of[band] else ""
            for band in bands
        ]
        lines.append(f"| {chip} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


COLOURS = {"h100": "#1f77b4", "b200": "#d95f02", "gb200": "#1b9e77"}
WIDTH, LEFT, TOP = 360, 56, 28  # pixels of one panel, of the room beside and above it


def picture(panels: Mapping[str, Sequence[Priced]]) -> str:
    """Returns an SVG of measured against predicted times, one panel for each kind of operation, both axes logarithmic.
    On the line a price is exact; between the broken lines it is at most a quarter off."""
    drawn = [_panel(name, found, LEFT + place * (WIDTH + LEFT)) for place, (name, found) in enumerate(panels.items())]
    width, height = LEFT + len(panels) * (WIDTH + LEFT), TOP + WIDTH + 44
    size = f'width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect {size} fill="white"/>', *drawn, "</svg>"]) + "\n"


def _panel(name: str, found: Sequence[Priced], left: int) -> str:
    times = [math.log10(1e6 * each) for one in found for each in (one.measured, one.price)]
    low, high = math.floor(min(times)), math.ceil(max(times))
    scale = WIDTH / (high - low)

    def place(microseconds: float) -> float:
        return (math.log10(microseconds) - low) * scale

    lines = [f'<text x="{left}" y="{TOP - 10}" font-weight="bold">{name}</text>',
             f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{WIDTH}" fill="none" stroke="#888"/>']  # fmt: skip
    for decade in range(low, high + 1):
        at, label = (decade - low) * scale, f"10<tspan dy='-5' font-size='9'>{decade}</tspan>"
        lines += [f'<path d="M{left + at:.0f} {TOP}v{WIDTH}M{left} {TOP + WIDTH - at:.0f}h{WIDTH}" stroke="#eee"/>',
                  f'<text x="{left + at:.0f}" y="{TOP + WIDTH + 16}" text-anchor="middle">{label}</text>',
                  f'<text x="{left - 6}" y="{TOP + WIDTH - at + 4:.0f}" text-anchor="end">{label}</text>']  # fmt: skip
    for factor in (0.8, 1.0, 1.25):
        over = max(math.log10(factor) * scale, 0.0), max(-math.log10(factor) * scale, 0.0)
        ends = f"M{left + over[1]:.1f} {TOP + WIDTH - over[0]:.1f}L{left + WIDTH - over[0]:.1f} {TOP + over[1]:.1f}"
        dashes = "" if factor == 1 else ' stroke-dasharray="4 4"'
        lines.append(f'<path d="{ends}" stroke="#444"{dashes}/>')
    for number, chip in enumerate(dict.fromkeys(each.chip for each in found)):
        own = (each for each in found if each.chip == chip)
        points = (
            f"M{left + place(1e6 * each.measured):.1f} {TOP + WIDTH - place(1e6 * each.price):.1f}h0" for each in own
        )
        style = f'stroke="{COLOURS[chip]}" stroke-width="2.4" stroke-linecap="round" stroke-opacity="0.6"'
        at = f'x="{left + 10}" y="{TOP + 18 + 16 * number}"'
        lines += [f'<path d="{"".join(points)}" {style}/>', f'<text {at} fill="{COLOURS[chip]}">{chip}</text>']
    below, beside = f'x="{left + WIDTH / 2:.0f}" y="{TOP + WIDTH + 36}"', f"translate({left - 38} {TOP + WIDTH // 2})"
    lines += [f'<text {below} text-anchor="middle">measured, us</text>',
              f'<text transform="{beside} rotate(-90)" text-anchor="middle">predicted, us</text>']  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="print every operation")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write measured against predicted times as SVG")
    asked = parser.parse_args()
    found = {"Collectives": list(collectives()), "Matmuls": list(matmuls())}
    if asked.picture:
        asked.picture.write_text(picture(found))
    elif asked.all:
        for each in (one for several in found.values() for one in several):
            figures = f"{each.measured * 1e6:11.1f} us, priced {each.price * 1e6:11.1f}: {each.error:+.0%}"
            print(f"{each.chip:<6} {each.kind:<18} {each.group:<18} {each.band:<14} {figures}")
    else:
        print(f"Collectives, mean (worst):\n\n{table(found['Collectives'], mean)}\n")
        print(f"Matmuls, median (worst):\n\n{table(found['Matmuls'], median)}")


if __name__ == "__main__":
    main()
