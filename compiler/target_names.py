"""Targets by the names that their users say: `target=cpu-8` is `conf/target/_cpu.yaml` with eight devices.

Hydra asks a ConfigSource for configs; this one makes `target/<kind>-<N>` for every N, so that names work in overrides,
in sweeps and in the defaults list of a file alike.
"""

import re

from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

SEARCH_PATH = "meshloom://targets"
SIZED_KINDS = ("cpu",)
TARGET_PATTERNS = (*(f"{kind}-N" for kind in SIZED_KINDS), "local")  # what `target=` takes, for messages

_SIZED = re.compile(rf"target/(?P<name>(?P<kind>{'|'.join(SIZED_KINDS)})-(?P<size>[1-9]\d*))(\.yaml)?")


class TargetNames(ConfigSource):
    @staticmethod
    def scheme() -> str:
        return "meshloom"

    def load_config(self, config_path: str) -> ConfigResult:
        match = _SIZED.fullmatch(config_path)
        assert match, config_path  # Hydra asks is_config first
        config = {
            "defaults": [f"_{match['kind']}", "_self_"],
            "name": match["name"],
            "num_devices": int(match["size"]),
        }
        return ConfigResult(
            provider=self.provider, path=self.full_path(), config=OmegaConf.create(config), header={"package": None}
        )

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", "target")

    def is_config(self, config_path: str) -> bool:
        return _SIZED.fullmatch(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "" and results_filter != ObjectType.CONFIG:
            return ["target"]
        if config_path == "target" and results_filter != ObjectType.GROUP:
            return [f"{kind}-8" for kind in SIZED_KINDS]  # shell completion shows these as examples
        return []


def is_sized(name: str) -> bool:
    """True for a name with a number of devices in it, such as cpu-8."""
    return _SIZED.fullmatch(f"target/{name}") is not None


def register() -> None:
    """Make the scheme known to Hydra; needed once per process, before composing."""
    Plugins.instance().register(TargetNames)
