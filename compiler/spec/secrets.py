"""Shows a declaration without the values that it took from environment variables, which may be secrets.

Files of a run, checkpoints and logs show the interpolation instead of the value. Where two declarations are compared, a
slow digest of the value is added. docs/security.md, "Secrets", says what this promises.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

Sources = Mapping[str, str]  # keys of a declaration, each with its text before it was resolved
# A tenth of a second for each guess at a value: digests are in files that are shared, and a plain hash of a password of
# eight letters is found in a minute. It costs one call, for each value from the environment alone.
DIGEST_ROUNDS = 100_000


def as_written(values: Any, sources: Sources, path: str = "") -> Any:
    """Returns the plain values at `path` of a declaration, with the texts of `sources` instead of secret values."""
    return _replaced(values, sources, path, lambda text, _: text)


def as_compared(values: Any, sources: Sources, path: str = "") -> Any:
    """Returns the same with a digest of each value, so that texts are equal exactly if the values are."""
    return _replaced(values, sources, path, lambda text, value: f"{text} (digest {_digest(json.dumps(value))})")


def _replaced(values: Any, sources: Sources, path: str, show: Callable[[str, Any], str]) -> Any:
    if path in sources:
        return show(sources[path], values)
    if isinstance(values, Mapping):
        return {key: _replaced(value, sources, joined(path, key), show) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_replaced(value, sources, joined(path, i), show) for i, value in enumerate(values)]
    return values


@functools.cache
def _digest(text: str) -> str:
    return hashlib.pbkdf2_hmac("sha256", text.encode(), b"meshloom", DIGEST_ROUNDS).hex()[:16]


def joined(path: str, key: Any) -> str:
    """Returns the key of an item: ("tune", "mesh") -> "tune.mesh", ("names", 0) -> "names[0]"."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else str(key)
