"""Hydra's and OmegaConf's state of a whole process, put back as it was found.

Meshloom composes through sources and resolvers of its own, and takes Hydra's place. A program that calls it may be a
Hydra app itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.version import VersionBase
from omegaconf.basecontainer import BaseContainer

OF_A_SESSION = (GlobalHydra, VersionBase)  # what composing sets anew


@contextmanager
def hydra_state_put_back() -> Iterator[None]:
    """Within the `with`, Hydra may be set up anew; afterwards all is as it was, an app's own Hydra too."""
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
