"""What `overlap.search` tried, in words."""

from ...core.format import human_bytes, human_seconds, human_share
from ...schema import TriedReport


def line_of(one: TriedReport) -> str:
    """ "prefetch 1, unroll 2, sparse_core: 1.54 s, 0.3 % exposed, 9.5 GiB"."""
    return f"  {one.name}: {', '.join(cells_of(one))}"


def cells_of(one: TriedReport) -> tuple[str, ...]:
    """Its step, what of it is exposed, its memory; or why it has none."""
    if one.predicted_seconds is None or one.exposed_fraction is None or one.peak_bytes_per_chip is None:
        return (one.why_not or "not known",)
    exposed = f"{human_share(one.exposed_fraction)} exposed"
    host = f" and {human_bytes(one.host_bytes_per_chip)} of the host" if one.host_bytes_per_chip else ""
    memory = human_bytes(one.peak_bytes_per_chip) + host + (", does not fit" if one.fits is False else "")
    return human_seconds(one.predicted_seconds), exposed, memory
