"""Says in words what `overlap.search` tried."""

from collections.abc import Iterator

from ...core.format import counted, human_bytes, human_seconds, human_share
from ...schema import SearchReport, TriedReport


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


def lines_of_rest(search: SearchReport) -> Iterator[str]:
    """Yields a line for each reason for which candidates are not in the table."""
    if search.num_ruled_out:
        yield f"{counted(search.num_ruled_out, 'candidate')} could not save overlap.search.min_gain of the step"
    if search.num_equal:
        yield f"{counted(search.num_equal, 'candidate')} made a program that was compiled already"
    if search.num_untried:
        yield f"{counted(search.num_untried, 'candidate')} not tried: overlap.search.{search.bound}"
