"""Finds the published folder that a run began from, through the runs between: its tokenizer and its types are kept."""

from pathlib import Path

from meshloom.compiler.core.places import PUBLISHED, is_published, is_url
from meshloom.compiler.declare.published_folder import PublishedFolder

from ..rundir.folders import RunFolder

MOST_RUNS = 100  # one after the other


def published_origin(place: str) -> PublishedFolder | None:
    """Returns the folder that the weights at a place began from; None if they were drawn, or nothing says so."""
    for _ in range(MOST_RUNS):
        if is_published(place):
            return PublishedFolder(Path(place.removeprefix(PUBLISHED)))
        spec = {} if is_url(place) else RunFolder.around(Path(place)).declared
        checkpoint = spec.get("checkpoint") or {}
        before = checkpoint.get("weights_from") or checkpoint.get("restore_from")
        if not isinstance(before, str) or before == place:
            return None
        place = before
    return None
