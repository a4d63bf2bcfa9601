"""Imports a declaration of a peer: `import_declaration("maxtext", ["run_recipe.sh"], None)`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import COMMAND_LINE, ConfigError, Problem, use_one_of
from .maxtext import read_maxtext
from .reading import Given, Imported, PeerReading, peer_of, read_declaration
from .sources import Form, ReadText, find_declaration, yaml_value

_KEY_VALUE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_MAXTEXT_TRAIN = re.compile(r"(?i)(maxtext[\w./]*[./]|^|/)(pre_)?train(_compile)?(\.py)?$|.*maxtext.*/base\.yml$")


def _maxtext_values(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    found = [match for word in words if (match := _KEY_VALUE.fullmatch(word))]
    return _renamed({match[1]: yaml_value(match[2]) for match in found}), [
        word for word in words if word.endswith((".yml", ".yaml")) and "=" not in word
    ]


def _is_maxtext(words: Sequence[str]) -> bool:
    return any(_MAXTEXT_TRAIN.match(word) for word in words) and bool(_maxtext_values(words)[0])


def _maxtext_file(values: Mapping[str, Any]) -> dict[str, Any]:
    return _renamed({key: value for key, value in values.items() if key != "base_config"})


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values by the names of today's MaxText."""
    aliases = peer_of("maxtext").tables["aliases"]
    return {aliases.get(key, key): value for key, value in values.items()}


_RUNNER = "copy the keys of its model from MaxText's benchmarks/ (maxtext_*_model_configs.py), as KEY=VALUE words"
MAXTEXT = Form(
    files="yaml",
    is_train=_is_maxtext,
    values=_maxtext_values,
    of_file=_maxtext_file,
    wants="a yml of MaxText, or a command such as: python3 -m MaxText.train base.yml model_name=llama2-7b",
    ignored_files=("base.yml",),
    hints={"benchmark_runner": _RUNNER},
)


@dataclass(frozen=True)
class _Trainer:
    form: Form
    read: Callable[[PeerReading], None]
    launched: Callable[[Given, Mapping[str, str]], Given]


def _launched_maxtext(given: Given, launcher: Mapping[str, str]) -> Given:
    """Adds the machines of a launcher, where the command itself names none."""
    more: dict[str, Any] = {}
    if "device_type" in launcher and "compile_topology" not in given.values:
        more["compile_topology"] = launcher["device_type"]
    num = launcher.get("num_slices") or launcher.get("num_nodes")
    if num and num.isdigit() and not {"num_slices", "compile_topology_num_slices"} & given.values.keys():
        more["num_slices"] = int(num)
    return Given(given.place, {**given.values, **more}, given.flags, given.notes)


TRAINERS: Mapping[str, _Trainer] = {
    "maxtext": _Trainer(MAXTEXT, read_maxtext, _launched_maxtext),
}


def import_declaration(peer: str, words: Sequence[str], target: str | None, read_text: ReadText) -> Imported:
    """Returns a peer's declaration as overrides of ours. words: a file and changes to it, a command, or keys. target:
    the chips, where the declaration names none, or others. read_text: opens a file. Raises ConfigError with every
    problem."""
    if peer not in TRAINERS:
        fix = f"{use_one_of(peer, TRAINERS)}: meshloom import maxtext FILE"
        raise ConfigError([Problem(COMMAND_LINE, f"there is no trainer '{peer}' to import from", fix)])
    if not words:
        what = "names nothing to import"
        raise ConfigError([Problem(COMMAND_LINE, what, f"give {TRAINERS[peer].form.wants}")])
    trainer = TRAINERS[peer]
    given, launcher = find_declaration(trainer.form, words, read_text)
    others = [peer_of(name) for name in TRAINERS if name != peer]
    return read_declaration(peer_of(peer), trainer.launched(given, launcher), target, trainer.read, others)
