"""Values that a declaration takes from environment variables (`${oc.env:NAME}`), which may be secrets.

Files of a run, checkpoints, logs and messages show the interpolation instead of the value. Where two declarations are
compared, a slow digest of the value is added. All of this is promised by docs/security.md, "Secrets", which also says
what it does not cover.
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from ..core.redaction import hide, interpolation

Sources = Mapping[str, str]  # keys of a declaration, each with its text before it was resolved

# In the defaults of conf/, for keys that nobody typed: no secrets. Set to nothing, they are not set.
IN_DEFAULTS = ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME", "WANDB_PROJECT", "WANDB_MODE", "MLFLOW_EXPERIMENT_NAME")
NOT_IF_EMPTY = (*IN_DEFAULTS, "MLFLOW_TRACKING_URI")  # in a default too, but a server's address may hold a password
DIGEST_ROUNDS = 100_000  # a tenth of a second for each guess at a value

_reads: list[str] = []
_is_masked = False


def register_resolver() -> None:
    """Makes OmegaConf record which values come from the environment."""
    OmegaConf.register_new_resolver("oc.env", _env, replace=True)


def _env(name: str, *default: Any) -> Any:
    is_set = bool(os.environ.get(name)) if name in NOT_IF_EMPTY else name in os.environ
    if is_set and name not in IN_DEFAULTS:
        _reads.append(name)
        if _is_masked:
            return interpolation(name)
    if name in NOT_IF_EMPTY and not is_set and default:
        return default[0]
    return oc.env(name, *default)


@contextmanager
def masked() -> Iterator[None]:
    """Makes interpolations of variables resolve to their own text within the `with`."""
    global _is_masked
    _is_masked = True
    try:
        yield
    finally:
        _is_masked = False


def find_sources(composed: DictConfig) -> Sources:
    """Returns the keys whose values come from the environment, directly or through other keys. Remembers the values.

    {token: "${oc.env:TOKEN}", names: ["${token}"]} -> {"token": "${oc.env:TOKEN}", "names[0]": "${token}"}
    """
    return dict(_sources(composed, ""))


def _sources(node: DictConfig | ListConfig, path: str) -> Iterator[tuple[str, str]]:
    texts: Any = OmegaConf.to_container(node, resolve=False)
    for key, text in enumerate(texts) if isinstance(texts, list) else texts.items():
        if not isinstance(text, dict | list) and "${" not in str(text):
            continue
        where = _joined(path, key)
        _reads.clear()
        try:
            value = node[key]
        except OmegaConfBaseException:  # reported elsewhere
            continue
        if isinstance(text, str) and _reads:
            for name in _reads:
                hide(name, os.environ[name])
            yield where, text
        elif isinstance(value, DictConfig | ListConfig):
            yield from _sources(value, where)


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
        return {key: _replaced(value, sources, _joined(path, key), show) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_replaced(value, sources, _joined(path, i), show) for i, value in enumerate(values)]
    return values


@functools.cache
def _digest(text: str) -> str:
    return hashlib.pbkdf2_hmac("sha256", text.encode(), b"meshloom", DIGEST_ROUNDS).hex()[:16]


def _joined(path: str, key: Any) -> str:
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else str(key)
