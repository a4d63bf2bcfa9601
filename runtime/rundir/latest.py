"""`outputs/latest`: a link to the newest run directory that Hydra named by the clock."""

import os
import re
from contextlib import suppress
from pathlib import Path

LINK = "latest"
_BY_THE_CLOCK = re.compile(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d")  # conf/config.yaml: hydra.run.dir


def link_latest(run_dir: Path) -> None:
    """Points `latest`, beside the directories of the days, to this one: outputs/latest -> 2026-11-23/22-24-33.

    Nothing happens where a run directory was named by its user, where `latest` is something of the user's, and on a
    disk without links: a run is worth more than its link.
    """
    run_dir = run_dir.absolute()
    name = "/".join(run_dir.parts[-2:])
    link = run_dir.parent.parent / LINK
    if not _BY_THE_CLOCK.fullmatch(name) or (link.exists() and not link.is_symlink()):
        return
    made = link.with_name(f".{LINK}.{os.getpid()}")
    with suppress(OSError):
        made.unlink(missing_ok=True)
        made.symlink_to(name, target_is_directory=True)
        made.replace(link)  # at each moment there is one or the other
