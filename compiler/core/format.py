"""Formats quantities for people: three digits and a unit; lists by their first names."""

import math
from collections.abc import Sequence

SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))

LEAST_SECONDS = 1e-9  # anything smaller is rounding error
NUM_NAMED = 4  # of a longer list are named


def counted(number: int, one: str, many: str | None = None) -> str:
    """Returns a count with its noun: (1, 'chip') -> '1 chip'; (2000, 'chip') -> '2,000 chips'; (2, 'axis', 'axes') ->
    '2 axes'."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def be(number: int) -> str:
    """Returns the verb after `counted`: 1 -> 'is', 2 -> 'are'."""
    return "is" if number == 1 else "are"


def human_bytes(count: int) -> str:
    """Returns bytes as text: 1536 -> '1.5 KiB'; 1048575 -> '1.0 MiB'."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1023.95 and len(units) > 1:  # what rounds to 1024.0
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def human_seconds(seconds: float) -> str:
    """Returns seconds as text: 0.1784 -> '178 ms', 2_270_000 -> '26.3 days'."""
    for unit, scale, least in (("days", 86_400, 2 * 86_400), ("h", 3_600, 2 * 3_600)):
        if seconds >= least:
            return f"{three_digits(seconds / scale)} {unit}"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * scale:
            return f"{three_digits(seconds / scale)} {unit}"
    return f"{three_digits(seconds * 1e9)} ns" if seconds >= LEAST_SECONDS else "0 s"


def human_range(ends: tuple[float, float]) -> str:
    """Returns two numbers of seconds as text: (1.402, 1.71) -> '1.40 to 1.71 s'."""
    first, last = (human_seconds(end).rpartition(" ") for end in ends)
    unit = "" if first[-1] == last[-1] else f" {first[-1]}"
    return f"{first[0]}{unit} to {last[0]} {last[-1]}"


def human_count(count: float, unit: str = "") -> str:
    """Returns a count with a decimal prefix, as is usual for FLOP/s and bandwidths: (1.234e15, 'FLOPs') -> '1.23
    PFLOPs'."""
    for scale, prefix in SI:
        if abs(count) >= 0.9995 * scale:
            return f"{three_digits(count / scale)} {prefix}{unit}".strip()
    return f"{three_digits(count)} {unit}".strip()


def human_parameters(count: int) -> str:
    """Returns a number of parameters, in billions as models are named: 6_738_415_616 -> '6.74 B'."""
    return human_count(count).replace(" G", " B")


def human_share(share: float) -> str:
    """Returns a share in percent: 0.0744 -> '7.4 %'. A share above 0 is never shown as 0."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{share:.1%}".replace("%", " %")


def signed_share(change: float) -> str:
    """Returns a change in percent, with its sign: 0.0881 -> '+8.8 %'."""
    return f"{change:+.1%}".replace("%", " %")


def human_slowdown(fraction: float) -> str:
    """Returns a change of a time in percent: 0.31 -> '31 % longer'; -0.002 -> '0.2 % shorter'."""
    return f"{human_share(abs(fraction))} {'shorter' if fraction < 0 else 'longer'}"


def human_names(names: Sequence[str], most: int = NUM_NAMED, between: str = ", ") -> str:
    """Returns the first names of a list: (["a", "b", "c"], 2) -> 'a, b and 1 more'."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def three_digits(value: float) -> str:
    """Returns a number with three digits: 1234.5 -> '1,234'; 12.345 -> '12.3'; 1.2 -> '1.20'; 0.01234 -> '0.0123'."""
    if not value:
        return "0"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"
