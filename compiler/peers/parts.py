"""Parts of a declaration that several peers have: what is saved for the backward pass, and values of a section."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .mesh import Devices
from .reading import PeerReading, in_full, option_values


def put_remat(reading: PeerReading, choices: Mapping[str, str], because: str) -> None:
    """Puts the simplest policy that saves and offloads these activations; a layer's input is saved without being
    named."""
    named = {name: choice for name, choice in choices.items() if (name, choice) != ("layer_input", "save")}
    if not named:
        reading.put("remat=full", because)
    elif len(set(named.values())) > 1:
        reading.put("remat=by_name", because)
        pairs = option_values("remat", "by_name")["choices"]  # which a mapping on the command line adds to
        pairs = dict.fromkeys(pairs, "recompute") | {"layer_input": "save"} | named
        reading.put(f"remat.choices={{{', '.join(f'{name}: {choice}' for name, choice in pairs.items())}}}", because)
    else:
        reading.put("remat=offload" if "offload" in named.values() else "remat=save_names", because)
        reading.put(f"remat.names=[{','.join(named)}]", because)


def put_matmuls(
    reading: PeerReading, option: str, types: tuple[str, str], because: str, *, left_out: str | None = None,
    gathered: bool = False, history: int | None = None, has_head: bool = False,
) -> None:  # fmt: skip
    """Puts the types in which matmuls of layers multiply. option: that of `precision` for all else. types: of x and
    weights, and of gradients. left_out: a pattern of parameters that multiply as they are; None: there are none.
    gathered: whether weights are gathered in their type. history: the steps that scales come from; None: from
    magnitudes now. has_head: whether the head multiplies so, too."""
    forward, gradients = types
    own = next((name for name in ("fp8", "int8", "mxfp8") if _types(name) == (forward, gradients)), None)
    if own and option == "bfloat16":
        reading.put(f"precision={own}", because)
    if left_out or gathered or history or has_head or not (own and option == "bfloat16"):
        in_types = f"forward: {forward}, gradients: {gradients}"
        more = (f", gather: {forward}" if gathered else "") + (f", history: {history}" if history else "")
        rules = [f"{{match: null, {in_types}{more}}}"]
        rules = [f"{{match: {left_out}, forward: null, gradients: null}}", *rules] if left_out else rules
        rules = [f"{{match: head/*, {in_types}}}", *rules] if has_head else rules
        reading.put(f"precision.matmuls=[{', '.join(rules)}]", because)


def note_experts(reading: PeerReading, because: str) -> None:
    """Notes that experts multiply in 16 bits, as they do on GPUs."""
    if reading.model_value("num_experts"):
        reading.notes.append(f"{because}: experts multiply in bfloat16 here")


def _types(option: str) -> tuple[str, str]:
    rule = option_values("precision", option)["matmuls"][0]
    return rule["forward"], rule["gradients"]


def put_values(reading: PeerReading, section: str, option: str, values: Mapping[str, tuple[Any, str]]) -> None:
    """Puts the values that differ from those of our config file. values: with the peer's key of each."""
    ours = option_values(section, option)
    for key, (value, because) in values.items():
        written = "null" if value == "null" else f"{in_full(value)}"
        default = ours.get(key)
        if written != ("null" if default is None else f"{in_full(default)}"):
            reading.put(f"{section}.{key}={written}", reading.said(because))


def put_moments_on_host(reading: PeerReading, key: str, optimizer: str, devices: Devices | None) -> None:
    """Puts the moments of layers in the host's memory. key: the peer's, which is true. optimizer: ours."""
    fix = f"to import the program without it, add {key}=false"
    if "moments_on" not in option_values("optimizer", optimizer) or optimizer == "sgd":  # whose momentum no peer gives
        reading.refuse(key, f"{optimizer} has no moments that lie on the host here", fix)
    elif devices is not None and devices.is_gpu:
        what = f"moments lie on the host of TPUs alone here, and the target is {devices.name}"
        reading.refuse(key, what, fix)
    else:
        reading.put("optimizer.moments_on=host", reading.said(key))
        what = "the moments of layers lie on the host here; the update and all else of the state stay on the device"
        reading.notes.append(f"{key}: {what}")


def put_flags(reading: PeerReading, flags: Sequence[str], is_gpu: bool) -> None:
    """Puts XLA's flags as compiler options, instead of the chip's preset. A flag that dumps, or is for a runtime, has
    no effect on a program."""
    options: dict[str, str] = {}
    left: list[str] = []
    for flag in flags:
        name, _, value = flag.lstrip("-").partition("=")
        value = value.strip("'\"")
        if not name.startswith("xla_") or "dump" in name or _OF_A_PLACE.search(name):
            left.append(name)
        elif value:  # XLA itself reads an empty value as its default
            options[name] = value.lower() if value.lower() in ("true", "false") else value
    if left:
        reading.notes.append(f"flags without effect on a program: {', '.join(dict.fromkeys(left))}")
    other = "xla_tpu" if is_gpu else "xla_gpu"
    for name in [name for name in options if name.startswith(other)]:
        reading.notes.append(f"{name}: not of this target's compiler; left out")
        del options[name]
    if options:
        because = "LIBTPU_INIT_ARGS" if not is_gpu else "XLA_FLAGS"
        shown = ", ".join(f"{name}: {_quoted(value)}" for name, value in options.items())
        reading.put("overlap.flag_presets=[]", because)
        reading.put(f"compiler_options={{{shown}}}", because)


_OF_A_PLACE = re.compile(r"_(path|dir|file|to)$")


def _quoted(value: str) -> str:
    return value if re.fullmatch(r"[\w.+-]+", value) else f"'{value}'"
