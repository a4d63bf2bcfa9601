"""What a newcomer may try after the first run: said once, to people."""

from collections.abc import Sequence
from pathlib import Path

from meshloom.compiler.config.hydra_settings import RUN_DIR
from meshloom.compiler.config.override_parser import overridden_key

TRY_NEXT = (
    ("try: other layout", "meshloom train sharding=fsdp_tensor num_microbatches=2 remat=full"),
    ("try: large model", "meshloom explain model=llama3_405b target=cpu-4096 global_batch_size=4096"),
    ("try: all options", "meshloom train --help"),
)


def next_steps(run_dir: Path, overrides: Sequence[str], *, is_terminal: bool) -> Sequence[tuple[str, str]]:
    """Rows for the summary of a run; none off a terminal, in a directory that has runs, or for one who names run
    directories, as a sweep does for its points."""
    is_named = RUN_DIR in map(overridden_key, overrides)
    if not is_terminal or is_named or run_dir.is_absolute():
        return ()
    first, *others = run_dir.parts
    others_too = (path for path in Path(first).glob("/".join("*" for _ in others) or ".") if path.is_dir())
    return () if any(path != run_dir for path in others_too) else TRY_NEXT
