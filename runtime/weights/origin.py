"""Finds the published folder that a run began from, through the runs between: its tokenizer and its types are kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshloom.compiler.core.places import PUBLISHED, is_published, is_url

from ..core.files import parse_json
from ..rundir.find_runs import SPEC
from .folder import CONFIG, TOKENIZER_FILES

MOST_RUNS = 100  # one after the other


@dataclass(frozen=True)
class Origin:
    """The folder that weights began from. config: its config.json; empty if it has gone. tokenizer: the files of its
    tokenizer."""

    path: Path
    config: Mapping[str, Any]
    tokenizer: tuple[Path, ...]

    @property
    def dtype(self) -> str | None:
        """Returns the type of its weights, as config.json names it."""
        return self.config.get("dtype") or self.config.get("torch_dtype")


def origin_of(place: str) -> Origin | None:
    """Returns the origin of the weights at a place; None if they were drawn, or nothing says so."""
    for _ in range(MOST_RUNS):
        if is_published(place):
            return _opened(Path(place.removeprefix(PUBLISHED)))
        spec = {} if is_url(place) else declared_run(Path(place))
        checkpoint = spec.get("checkpoint") or {}
        before = checkpoint.get("weights_from") or checkpoint.get("restore_from")
        if not isinstance(before, str) or before == place:
            return None
        place = before
    return None


def declared_run(place: Path) -> dict[str, Any]:
    """Returns the declaration of a run by its directory, its folder of checkpoints or one of them; {} without one."""
    for folder in (place, place.parent, place.parent.parent):
        try:
            spec = yaml.safe_load((folder / SPEC).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            continue
        return spec if isinstance(spec, dict) else {}
    return {}


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """Returns the files of a tokenizer in a folder."""
    return tuple(folder / name for name in TOKENIZER_FILES if (folder / name).is_file())


def _opened(folder: Path) -> Origin:
    try:
        config = parse_json((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        config = {}
    return Origin(folder, config if isinstance(config, dict) else {}, tokenizer_files(folder))
