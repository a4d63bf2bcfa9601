"""The compiler flags of an artifact, which the hosts that load it must have too."""

from pathlib import Path

from meshloom.compiler.xla.fingerprint import FLAGS, UNSET

from ..compile.artifact import read_artifact


def flags_of_artifact(artifact: str) -> dict[str, str]:
    """Returns the variables that the artifact was compiled with, if it is on this machine too; else none: its place may
    be known to the hosts alone. Raises ConfigError for one that is damaged."""
    if not Path(artifact).exists():
        return {}
    environment = read_artifact(Path(artifact)).fingerprint.environment
    return {name: environment[name] for name in FLAGS if environment.get(name, UNSET) != UNSET}
