"""Quantities as people read them."""


def human_bytes(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def human_count(count: float) -> str:
    """3.1e12 -> '3.1 T'."""
    value, units = float(count), ["", "k", "M", "G", "T", "P", "E"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}".strip()


def human_seconds(seconds: float) -> str:
    """0.0123 -> '12.3 ms'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
