"""Saves and restores the process-wide state of Hydra and OmegaConf.

Meshloom composes through its own sources and resolvers, and sets up Hydra. A program that calls it may itself be a
Hydra app.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.version import VersionBase
from omegaconf.basecontainer import BaseContainer

OF_A_SESSION = (GlobalHydra, VersionBase)  # state that composing sets


@contextmanager
def hydra_state_put_back() -> Iterator[None]:
    """Restores Hydra's state after the `with`, an app's own too, so that Hydra can be set up within it."""
    Plugins.instance()  # registers Hydra's own sources, once
    instances, resolvers = dict(Singleton._instances), dict(BaseContainer._resolvers)
    sources = dict(SourcesRegistry.instance().types)
    for kind in OF_A_SESSION:
        Singleton._instances.pop(kind, None)
    try:
        yield
    finally:
        for kind in OF_A_SESSION:
            Singleton._instances.pop(kind, None)
        Singleton._instances.update(instances)
        BaseContainer._resolvers = resolvers
        SourcesRegistry.instance().types = sources
