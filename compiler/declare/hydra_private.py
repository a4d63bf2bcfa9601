"""The private parts of Hydra and OmegaConf that Meshloom uses, read in Hydra 1.3.8 and OmegaConf 2.3.1.

No other file uses one. If a release drops a name:

    FileConfigSource, StructuredConfigSource,       subclasses of the public `ConfigSource` that read YAML themselves
      ImportlibResourcesConfigSource
    SourcesRegistry                                 none: Hydra has no public way to replace a source
    ConfigLoaderImpl, IConfigRepository,            `GlobalHydra.instance().config_loader().get_group_options`, a second
      _parse_overrides_and_create_caching_repo        for each request, and `hydra.compose` in a session of its own
      create_config_search_path
    _apply_overrides_to_config                      `hydra.compose` of every declaration, a quarter of a second each
    _instances, _resolvers                          `Singleton.get_state` and `set_state`, which copy every instance
    defaults_list._create_interpolation_map         Hydra's own, which takes a seventh of the time of a composition
    get_args_parser                                 a parser of our own with the flags of Hydra's applications
    get_yaml_loader, ConfigSource._get_header_dict  `load_config` of Hydra's own source, which parses YAML in Python
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import yaml
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra._internal.core_plugins.structured_config_source import StructuredConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.plugins.config_source import ConfigSource
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import DictConfig
from omegaconf._utils import get_yaml_loader
from omegaconf.basecontainer import BaseContainer

__all__ = ["FileConfigSource", "IConfigRepository", "ImportlibResourcesConfigSource", "StructuredConfigSource"]

OF_A_SESSION = (GlobalHydra, VersionBase)  # state that composing sets


def replace_sources(sources: Sequence[type[ConfigSource]]) -> None:
    """Makes Hydra read the schemes of these sources by them."""
    Plugins.instance()  # registers Hydra's own, which these replace
    for source in sources:
        SourcesRegistry.instance().types[source.scheme()] = source
    defaults_list._create_interpolation_map = _interpolation_map


_hydras_interpolation_map = defaults_list._create_interpolation_map


def _interpolation_map(overrides: Any, defaults: list[Any], self_added: bool) -> DictConfig:
    """Returns the choices that interpolations in a defaults list refer to. Hydra makes them a DictConfig for each file,
    and reads it only where there is an interpolation."""
    if any(default.is_interpolation() for default in defaults if not default.is_self()):
        return _hydras_interpolation_map(overrides, defaults, self_added)
    return DictConfig({})


@cache
def _yaml_loader() -> Any:
    """Returns OmegaConf's loader of YAML, with libyaml's parser where PyYAML has it: it takes a fifth of the time."""
    if not yaml.__with_libyaml__:
        return get_yaml_loader()

    omegaconf_loader = get_yaml_loader()

    class Loader(yaml.CSafeLoader, omegaconf_loader):
        """CSafeLoader has the parser and comes first; OmegaConf's has the forms of numbers, whatever other packages
        have added to CSafeLoader's."""

        yaml_implicit_resolvers = omegaconf_loader.yaml_implicit_resolvers
        yaml_constructors = omegaconf_loader.yaml_constructors

    return Loader


def parse_config(text: str) -> tuple[dict[str, str | None], Any]:
    """Returns the header of a config file, `# @package _global_` and the like, and its values."""
    return ConfigSource._get_header_dict(text), yaml.load(text, _yaml_loader()) or {}


class _KeepsSources(SourcesRegistry):
    """Hydra's registry, which keeps our sources where Hydra registers its own again."""

    def register(self, type_: type[ConfigSource]) -> None:
        self.types.setdefault(type_.scheme(), type_)


def make_sources_portable() -> None:
    """Lets launchers take Hydra's state to other processes: Hydra registers its own sources there, and would take ours,
    which come with the state, for a mistake."""
    SourcesRegistry.instance().__class__ = _KeepsSources


@contextmanager
def hydra_state_put_back() -> Iterator[None]:
    """Restores the state that Hydra and OmegaConf keep for the process after the `with`, an application's own too, so
    that Hydra can be set up within it."""
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


def config_repository(config_name: str, overrides: Sequence[str]) -> IConfigRepository:
    """Returns Hydra's view of all places that hold configs; only within a session.

    Hydra's public `get_group_options` parses the main config and makes a new repository for each group: a second of
    processor time, where one repository takes a tenth of that.
    """
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    return loader._parse_overrides_and_create_caching_repo(config_name, list(overrides))[1]


def compose_from(place: str, overrides: Sequence[str]) -> DictConfig:
    """Returns the composition of `config` as found in one place alone, "pkg://meshloom.conf", with Hydra's node."""
    loader = ConfigLoaderImpl(create_config_search_path(place))
    return loader.load_configuration("config", list(overrides), run_mode=RunMode.RUN)


def apply_overrides(overrides: list[Override], composed: DictConfig) -> None:
    """Applies overrides of values to a composition, in place."""
    ConfigLoaderImpl._apply_overrides_to_config(overrides, composed)


def hydra_flags() -> argparse.ArgumentParser:
    """Returns the parser of the flags that every application of Hydra has."""
    parser: Any = get_args_parser()
    return parser
