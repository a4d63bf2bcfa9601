"""Reports errors in a user's code with the last lines of its traceback, without Meshloom's and its libraries'."""

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ConfigError, Problem

NUM_FRAMES = 3  # of a user's traceback that are shown
OURS = Path(__file__).resolve().parents[2]
STDLIB = Path(sysconfig.get_paths()["stdlib"])
LIBRARIES = frozenset({  # of whose code a line says nothing to a user
    "brax", "chex", "diffrax", "einops", "equinox", "flax", "grain", "haiku", "haliax", "jax", "jaxlib", "jaxopt",
    "jaxtyping", "keras", "meshloom", "numpy", "numpyro", "optax", "orbax", "pydantic", "qwix", "tensorflow",
    "tf_keras",
})  # fmt: skip


@contextmanager
def blamed_on_user(where: str, doing: str, *, is_theirs: bool) -> Iterator[None]:
    """Turns an exception from a user's code into a ConfigError at `where`; Meshloom's own exceptions pass.

    is_theirs: the running object was built from a user's class, so an exception without a frame of theirs counts too.
    """
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        if not is_theirs and not _their_frames(error):
            raise
        raise ConfigError([problem_in_user_code(where, doing, error)]) from error


def problem_in_user_code(where: str, doing: str, error: Exception | SystemExit) -> Problem:
    """Returns an exception as a sentence, with the last frames of the user's code, or else the last frame."""
    text = " ".join(str(error).split())
    frames = _their_frames(error)[-NUM_FRAMES:] or traceback.extract_tb(error.__traceback__)[-1:]
    lines = "".join(f"\n    {_short(f.filename)}:{f.lineno}: {f.line}" for f in frames if f.line)
    told = f"{doing} failed: {type(error).__name__}" + (f": {text}" if text else "")
    if isinstance(error, SystemExit):
        told = f"{doing} called sys.exit({text if error.code is not None else ''})"
    return Problem(where, told + lines, "correct it there")


def _their_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the frames outside of Meshloom, Python and the libraries between them and the user's code."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if _is_theirs(Path(frame.filename))]


def _is_theirs(path: Path) -> bool:
    if str(path).startswith("<") or path.is_relative_to(OURS):
        return False
    if "site-packages" in path.parts:
        return path.parts[path.parts.index("site-packages") + 1] not in LIBRARIES
    return not path.is_relative_to(STDLIB)


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
