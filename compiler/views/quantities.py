"""Numbers as people read them: three digits and a unit."""

SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def human_seconds(seconds: float) -> str:
    """0.1784 -> '178 ms'."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * scale:
            return f"{three_digits(seconds / scale)} {unit}"
    return f"{three_digits(seconds * 1e9)} ns" if seconds else "0 s"


def human_count(count: float, unit: str) -> str:
    """(1.234e15, 'FLOPs') -> '1.23 PFLOPs'; powers of ten, as FLOP/s and link bandwidths are told."""
    for scale, prefix in SI:
        if abs(count) >= 0.9995 * scale:
            return f"{three_digits(count / scale)} {prefix}{unit}"
    return f"{three_digits(count)} {unit}"


def human_share(share: float) -> str:
    """0.0744 -> '7.4 %'; what is there is not told as nothing."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{share:.1%}".replace("%", " %")


def three_digits(value: float) -> str:
    """1234.5 -> '1,234'; 12.345 -> '12.3'; 1.2 -> '1.20'; never an exponent."""
    digits = max(0, 2 - (len(f"{abs(value):.0f}") - 1))
    if abs(value) < 1 and value:
        return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.5f}"
    return f"{value:,.{digits}f}"
