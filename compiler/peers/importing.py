"""Imports a declaration of a peer: `import_declaration("maxtext", ["run_recipe.sh"], None)`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import COMMAND_LINE, ConfigError, Problem, use_one_of
from ..core.key_paths import leaves
from .maxtext import read_maxtext
from .megatron import read_megatron
from .reading import Given, Imported, PeerReading, peer_of, read_declaration
from .sources import Form, FormWords, ReadText, find_declaration, yaml_value
from .torchtitan import read_torchtitan

_KEY_VALUE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_MAXTEXT_TRAIN = re.compile(r"(?:^|[./])train(_compile)?(\.py)?$|/base\.yml$")


def _maxtext_values(words: Sequence[str]) -> FormWords:
    found = [match for word in words if (match := _KEY_VALUE.fullmatch(word))]
    values = _aliased("maxtext", {match[1]: yaml_value(match[2]) for match in found})
    files = [word for word in words if word.endswith((".yml", ".yaml")) and "=" not in word]
    begin = next((at + 1 for at, word in enumerate(words) if _MAXTEXT_TRAIN.search(word)), 0)
    strays = [word for word in words[begin:] if word.strip() and word not in files and not _KEY_VALUE.fullmatch(word)]
    return FormWords(values, files, strays)


def _is_maxtext(words: Sequence[str]) -> bool:
    return any(_MAXTEXT_TRAIN.search(word) for word in words) and bool(_maxtext_values(words).values)


def _maxtext_file(values: Mapping[str, Any]) -> dict[str, Any]:
    return _aliased("maxtext", {key: value for key, value in values.items() if key != "base_config"})


_RUNNER = "copy the keys of its model from MaxText's benchmarks/ (maxtext_*_model_configs.py), as KEY=VALUE words"
MAXTEXT = Form(
    files="yaml",
    is_train=_is_maxtext,
    values=_maxtext_values,
    of_file=_maxtext_file,
    wants="a yml of MaxText, or a command such as: python3 -m MaxText.train base.yml model_name=llama2-7b",
    key="a key is written KEY=VALUE, such as steps=100",
    ignored_files=("base.yml",),
    base_key="base_config",
    hints={"benchmark_runner": _RUNNER},
)


_ASSIGNED = re.compile(r"\+*[A-Za-z_][\w.]*=")
_TITAN_TRAIN = re.compile(r"(.*/)?(run_(llama_)?train\.sh|train\.py)$|torchtitan\.train$")
_MEGATRON_TRAIN = re.compile(r"(.*/)?(pretrain_\w+|\w*setup_experiment|run_recipe|run_script)\.py$")
_SECTIONS = {"model", "train", "optimizer", "scheduler", "ddp", "dataset", "mixed_precision", "comm_overlap",
             "checkpoint",
             "logger", "tokenizer", "rng", "dist", "profiling", "validation"}  # fmt: skip


def _flags(words: Sequence[str], prefixes: str) -> tuple[dict[str, Any], list[str]]:
    """Returns the values of `--name value`, `--name=value` and `--name` alone, which is true; and words that belong to
    none."""
    found: dict[str, Any] = {}
    strays: list[str] = []
    name = ""
    for word in words:
        if re.match(rf"{prefixes}[A-Za-z]", word):
            name, has_value, value = word.lstrip("-").partition("=")
            found[name] = yaml_value(value) if has_value else True
            name = "" if has_value else name
        elif name and not _ASSIGNED.match(word):
            before = found[name]
            found[name] = yaml_value(word) if before is True else f"{before} {word}"
        elif word.strip():
            strays.append(word)
    return found, strays


def _assigned(strays: list[str], is_key: Callable[[str], bool]) -> tuple[dict[str, Any], list[str]]:
    """Returns the values of KEY=VALUE words among others, and the other words. is_key: takes a KEY."""
    words = {word: word.lstrip("+").partition("=") for word in strays if _ASSIGNED.match(word)}
    found = {word: (key, value) for word, (key, _, value) in words.items() if is_key(key)}
    return {key: yaml_value(value) for key, value in found.values()}, [word for word in strays if word not in found]


def _aliased(peer: str, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values by the names of today's peer."""
    aliases = peer_of(peer).tables["aliases"]
    return {aliases.get(key, key): value for key, value in values.items()}


def _of_tyro(key: str, value: Any) -> tuple[str, Any]:
    """Returns a flag by the name that it has in files: --compile.no-enable is compile.enable=false."""
    section, _, last = key.replace("-", "_").rpartition(".")
    is_off = value is True and last.startswith("no_")
    return (
        f"{section}.{last.removeprefix('no_')}" if is_off else f"{section}.{last}" if section else last,
        not is_off and value,
    )


def _titan_values(words: Sequence[str]) -> FormWords:
    begin = next((at + 1 for at, word in enumerate(words) if _TITAN_TRAIN.match(word)), 0)
    flags, strays = _flags(words[begin:], "--")
    more, strays = _assigned(strays, lambda key: "." in key)
    found = dict(_of_tyro(key, value) for key, value in (*flags.items(), *more.items()))
    files = [str(found.pop("job.config_file"))] if "job.config_file" in found else []
    return FormWords(_aliased("torchtitan", found), files, strays)


def _titan_file(values: Mapping[str, Any]) -> dict[str, Any]:
    return _aliased(
        "torchtitan", {key: value for key, value in leaves(values) if value != {}}
    )  # a section without keys


def _megatron_values(words: Sequence[str]) -> FormWords:
    begin = next((at + 1 for at, word in enumerate(words) if _MEGATRON_TRAIN.match(word)), 0)
    flags, strays = _flags(words[begin:], "--?")
    found = {name.replace("-", "_"): value for name, value in flags.items()}
    more, strays = _assigned(strays, _is_of_bridge)
    found |= {key.rpartition(".")[2].replace("-", "_"): value for key, value in more.items()}
    return FormWords(_aliased("megatron", found), (), strays)


def _is_of_bridge(key: str) -> bool:
    section = key.rpartition(".")[0]
    return not section or section in _SECTIONS


def _megatron_file(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a YAML: arguments as keys, also below MODEL_ARGS, or the sections of Megatron Bridge."""
    found = dict[str, Any]()
    for key, value in leaves({name: part for name, part in values.items() if name != "ENV_VARS"}):
        section, _, last = key.rpartition(".")
        is_known = section in ("", "MODEL_ARGS", "language_model", "model_parallel") or section in _SECTIONS
        found[last.lstrip("-").replace("-", "_") if is_known else key] = value
    return _aliased("megatron", found)


TITAN = Form(
    files="toml",
    is_train=lambda words: any(_TITAN_TRAIN.match(word) for word in words),
    values=_titan_values,
    of_file=_titan_file,
    wants="a TOML file of torchtitan, or a command such as: CONFIG_FILE=llama3_8b.toml ./run_train.sh",
    key="a key is written --SECTION.KEY VALUE, such as --training.seq_len 8192",
    file_variables=("CONFIG_FILE",),
)
MEGATRON = Form(
    files="yaml",
    is_train=lambda words: any(_MEGATRON_TRAIN.match(word) for word in words),
    values=_megatron_values,
    of_file=_megatron_file,
    wants="a command, a script or a YAML of arguments, such as: torchrun pretrain_gpt.py --num-layers 32 ...",
    key="a key is written --KEY VALUE, such as --seq-length 8192",
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


def _launched_megatron(given: Given, launcher: Mapping[str, str]) -> Given:
    """Adds the number of GPUs that torchrun starts."""
    each, nodes = launcher.get("nproc_per_node", ""), launcher.get("num_nodes", "1")
    if not each.isdigit() or not nodes.isdigit() or "num_gpus" in given.values:
        return given
    return Given(given.place, {**given.values, "num_gpus": int(each) * int(nodes)}, given.flags, given.notes)


TRAINERS: Mapping[str, _Trainer] = {
    "maxtext": _Trainer(MAXTEXT, read_maxtext, _launched_maxtext),
    "torchtitan": _Trainer(TITAN, read_torchtitan, lambda given, launcher: given),
    "megatron": _Trainer(MEGATRON, read_megatron, _launched_megatron),
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
    forms = {name: each.form.is_train for name, each in TRAINERS.items() if name != peer}
    given, launcher = find_declaration(replace(trainer.form, others=forms), words, read_text)
    others = [peer_of(name) for name in TRAINERS if name != peer]
    return read_declaration(peer_of(peer), trainer.launched(given, launcher), target, trainer.read, others)
