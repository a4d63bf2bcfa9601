"""Values that a declaration takes from environment variables (`${oc.env:NAME}`), which may be secrets.

docs/security.md, "Secrets", says what is promised of them, and what is not covered.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from ..core.visible import hide, interpolation
from ..spec.secrets import Sources, joined

# Defaults in conf/ read these variables; they are no secrets. One that is set to nothing counts as not set.
IN_DEFAULTS = ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME", "WANDB_PROJECT", "WANDB_MODE", "MLFLOW_EXPERIMENT_NAME")
NOT_IF_EMPTY = (*IN_DEFAULTS, "MLFLOW_TRACKING_URI")  # in a default, too, but a server's address may hold a password

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


def find_sources(composed: DictConfig, texts: Mapping[str, Any]) -> Sources:
    """Returns the keys whose values come from the environment, directly or through other keys. Remembers the values.

    texts: the same as plain values, with their interpolations unresolved.
    {token: "${oc.env:TOKEN}", names: ["${token}"]} -> {"token": "${oc.env:TOKEN}", "names[0]": "${token}"}
    """
    return dict(_sources(composed, texts, ""))


def _sources(node: Any, texts: Any, path: str) -> Iterator[tuple[str, str]]:
    for key, text in enumerate(texts) if isinstance(texts, list) else texts.items():
        if "${" not in str(text):  # nor does any value in it
            continue
        where = joined(path, key)
        _reads.clear()
        try:
            value = node[key]
        except OmegaConfBaseException:  # reported elsewhere
            continue
        if isinstance(text, str) and _reads:
            for name in _reads:
                hide(name, os.environ[name])
            yield where, text
        elif OmegaConf.is_config(value):
            inner = OmegaConf.to_container(value, resolve=False) if isinstance(text, str) else text
            yield from _sources(value, inner, where)
