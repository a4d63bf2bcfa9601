"""What a config file may not say, because code would run or be loaded for it; the command line may say all of it.

    hydra.callbacks, hydra.job_logging, hydra.launcher, ...   Hydra calls what they name
    hydra.searchpath: [pkg://a.b]                             Hydra imports a.b: only what allowed_code.py allows
    artifact, compilation_cache                               programs are loaded from there
    compiler_options: {xla_gpu_cuda_data_dir: ...}            XLA runs what lies there, or writes there
    distributed.coordinator_address                           every process connects to it

A config file here is one that is not Meshloom's own: from --config-dir, --config-path or hydra.searchpath.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins import structured_config_source
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import create_config_search_path
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ..core.errors import Problem
from ..core.key_paths import is_within, leaves, value_at
from . import target_names
from .allowed_code import check_importable
from .config_limits import FileConfigSource
from .hydra_settings import SEARCH_PATH
from .override_parser import parsed_or_none

OWN_SOURCES = {("pkg", "hydra.conf"), ("pkg", "meshloom.conf"), ("meshloom", "targets"), ("structured", "")}

# Of Hydra's own node, what a file of configs may set: names of folders, and texts that are shown.
FREE_OF_HYDRA = ("run.dir", "sweep.dir", "sweep.subdir", "searchpath", "help", "hydra_help", "verbose", "runtime",
                 "overrides", "job.name", "job.config_name", "job.override_dirname", "job.id", "job.num",
                 "job.config")  # fmt: skip

# Of a declaration, what only the command line sets. A file may say null, or what conf/config.yaml says.
TYPED_ONLY = {
    "artifact": "its programs are loaded, which runs code",
    "compilation_cache": "the programs in it are loaded, which runs code",
    "distributed.coordinator_address": "every process connects to it",
}
COMPILER_OPTIONS = "compiler_options"
_NAMES_A_PLACE = re.compile(r"dump|file|path|(^|_)dir|_to$|_from$|denylist|plugin|librar|extra_flags")


class CheckedPackages(ImportlibResourcesConfigSource):
    """`pkg://a.b` as Hydra has it, once it is known that a.b may be imported."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        check_importable(self.path, SEARCH_PATH)


class StructuredConfigSource(structured_config_source.StructuredConfigSource):
    """`structured://a.b`, likewise. Hydra knows the last of its sources by this name."""

    def __init__(self, provider: str, path: str) -> None:
        module = path.removeprefix(f"{self.scheme()}://")
        if module:
            check_importable(module, SEARCH_PATH)
        super().__init__(provider, path)


def register_sources() -> None:
    """Make Hydra look for configs through our own sources; needed before composing."""
    Plugins.instance()  # registers Hydra's own, which these take the place of
    for source in (CheckedPackages, FileConfigSource, StructuredConfigSource):
        SourcesRegistry.instance().types[source.scheme()] = source
    target_names.register()


def problems_of_files(composed: DictConfig, overrides: Sequence[str]) -> list[Problem]:
    """What config files say and may not. composed: with Hydra's node, nothing resolved. overrides: as typed."""
    typed = _parsed(overrides)
    values = _plain(composed)
    problems = [*_of_typed_only(values, typed), *_of_compiler_options(values, typed)]
    sources = composed.hydra.runtime.config_sources
    if any((source.schema, source.path) not in OWN_SOURCES for source in sources):
        problems += _of_hydra(values["hydra"], overrides)
    return problems


def _of_typed_only(values: dict[str, Any], typed: list[Override]) -> Iterator[Problem]:
    own = yaml.safe_load((files("meshloom.conf") / "config.yaml").read_text())
    for key, why in TYPED_ONLY.items():
        value = value_at(values, key)
        if value not in (None, "???", value_at(own, key)) and not any(_sets(each, key) for each in typed):
            fix = f"take it out of there, and type {key}=... if you trust that place"
            yield Problem(key, f"a config file sets it, and {why}", fix)


def _of_compiler_options(values: dict[str, Any], typed: list[Override]) -> Iterator[Problem]:
    options = values.get(COMPILER_OPTIONS)
    for name in options if isinstance(options, dict) else ():
        key = f"{COMPILER_OPTIONS}.{name}"
        if _NAMES_A_PLACE.search(str(name)) and not any(_sets(each, key) for each in typed):
            what = "a config file sets it, and XLA may write to the place that it names, or run what lies there"
            yield Problem(key, what, f"take it out of there, and type {key}=... if you want it")


def _of_hydra(found: dict[str, Any], overrides: Sequence[str]) -> Iterator[Problem]:
    """Settings that are not as Meshloom's own configs and the command line make them."""
    try:
        own = _own_hydra(overrides)
    except HydraException:  # a choice of hydra/... that only a folder of configs has
        yield Problem("hydra", "Hydra's own settings are chosen from a folder of configs, and may run code",
                      "type them key by key, such as hydra.job_logging.root.level=INFO")  # fmt: skip
        return
    known = _as_json(own)
    for key, value in _as_json(found).items():
        is_free = any(is_within(key, free) for free in FREE_OF_HYDRA)
        if not is_free and known.get(key) != value:
            what = "a config file sets it, and Hydra's own settings may run code"
            yield Problem(f"hydra.{key}", what, f"take it out of there, and type 'hydra.{key}=...' if you want it")


def _own_hydra(overrides: Sequence[str]) -> dict[str, Any]:
    """Hydra's node as it is without any other folder of configs. Raises HydraException if a choice is not in ours."""
    typed = [each for each in _parsed(overrides) if each.is_hydra_override() and each.key_or_group != SEARCH_PATH]
    kept = [each.input_line for each in typed if each.input_line]
    loader = ConfigLoaderImpl(create_config_search_path("pkg://meshloom.conf"))
    composed = loader.load_configuration("config", kept, run_mode=RunMode.RUN)
    return _plain(composed.hydra)


def _plain(node: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(node, resolve=False)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _parsed(overrides: Sequence[str]) -> list[Override]:
    return [parsed for parsed in map(parsed_or_none, overrides) if parsed]


def _as_json(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: json.dumps(value, default=str) for key, value in leaves(values)}


def _sets(override: Override, key: str) -> bool:
    return is_within(key, override.key_or_group) and not override.is_delete()
