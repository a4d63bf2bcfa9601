"""Finds the weights that a new run starts from, before anything is allocated: in a published folder, or another run."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import counted, human_bytes, human_names
from meshloom.compiler.core.places import PUBLISHED, is_published
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.declare.data_spec import BytesTokenizer, DataSpec
from meshloom.compiler.declare.gguf_file import PLAIN
from meshloom.compiler.declare.published_folder import CONFIG, understood
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.plan import Plan
from meshloom.compiler.sharding.sharding import ShardingPlan
from meshloom.models import is_counted
from meshloom.models.adapter import is_adapter
from meshloom.models.config import Config
from meshloom.models.published import tensors_in

from ..checkpoint.find import EXPECTED, Checkpoint, check_is_there, newest_good, saved_tree
from ..checkpoint.meaning import meaning_of
from ..core.failures import STORAGE, RunFailed
from ..core.files import check_bucket, damage_in, folder_at
from ..processes.distributed import Processes, together
from .folder import FROM, Matched, WeightsFolder, match_folder, match_saved, open_folder
from .peft_folder import adapter_arrays, describe_adapter, grown_folder, merged_folder


@dataclass(frozen=True)
class PublishedWeights:
    """The weights of a published folder that the model takes. differs: lines about what is not as it is there.
    adapter: the parameters of a PEFT folder's adapter that goes on, by path; base: the place of what it changes."""

    folder: WeightsFolder
    matched: Matched
    differs: tuple[str, ...]
    adapter: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"{PUBLISHED}{self.folder.adapter or self.folder.path}"

    @property
    def base(self) -> str:
        return f"{PUBLISHED}{self.folder.path}" if self.adapter else self.place

    @property
    def fresh(self) -> tuple[str, ...]:
        return tuple(path for path in self.matched.fresh if path not in self.adapter)

    @property
    def num_bytes(self) -> int:
        return self.matched.num_bytes

    def __str__(self) -> str:
        taken = f"{counted(len(self.matched.taken), 'tensor')} of {human_bytes(self.num_bytes)}"
        return f"{self.place}: {taken}{describe_adapter(self.adapter)}"


@dataclass(frozen=True)
class SavedWeights:
    """The weights of another run's checkpoint. taken: the parameters that are read. masters: those of them that are
    read from its master weights, which are more precise."""

    start: Checkpoint
    taken: tuple[str, ...]
    masters: frozenset[str]
    fresh: tuple[str, ...]
    num_bytes: int
    differs: tuple[str, ...]

    @property
    def place(self) -> str:
        return str(self.start.path)

    @property
    def base(self) -> str:
        return self.place

    def __str__(self) -> str:
        return f"{self.place}: {counted(len(self.taken), 'parameter')} of {human_bytes(self.num_bytes)}"


StoredWeights = PublishedWeights | SavedWeights


def find_weights(plan: Plan[RunSpec], place: str | None = None) -> StoredWeights | None:
    """Returns the weights that a new run starts from; None if they are drawn. Reads headers alone. place: of others
    than the declaration's.

    Raises ConfigError for damage, and with all tensors that are missing, extra or of another shape.
    """
    place = place or plan.spec.checkpoint.weights
    if place is None:
        return None
    model, skip, params = plan.spec.model, plan.spec.checkpoint.weights_skip, _arrays(plan.sharding)
    if is_published(place):
        folder = open_folder(place, plan.spec.checkpoint.base_from)
        differs = _differences(folder.model, model, f"{folder.path}/{CONFIG}")
        adapter: Mapping[str, np.ndarray] = {}
        if folder.adapter and plan.model.adapters:
            adapter = adapter_arrays(folder, model, plan.model)
        elif folder.adapter:
            folder = merged_folder(folder, model)
        named = understood(lambda: tensors_in(model, folder.tensors, folder.model_type), "model")
        folder, grown = grown_folder(folder, named)
        matched = match_folder(folder, named, params, skip)
        return PublishedWeights(
            folder,
            matched,
            (
                *differs,
                *_rounded(folder),
                *_read_as_bytes(plan.spec.data, model.vocab_size, folder),
                *grown,
                *not_read(named.left_out),
            ),
            adapter,
        )
    check_bucket(folder_at(place), FROM)
    start = newest_good(*check_is_there(place, FROM), is_own=False, compare="sizes")
    tree = saved_tree(start.path)
    there, masters = leaves_by_path(tree["params"]), leaves_by_path(tree.get("master", {}))
    if all(map(is_adapter, there)):
        what = f"{start.path} holds an adapter, and its base is elsewhere"
        raise ConfigError([Problem(FROM, what, f"continue it: checkpoint.restore_from={place}")])
    taken = match_saved(str(start.path), there, params, skip)
    num_bytes = sum(params[path].size * params[path].dtype.itemsize for path in taken)
    meant = meaning_of(start.path).values.get("model")
    differs = _differences(meant if isinstance(meant, dict) else {}, model, f"the run of {start.path}")
    fresh = tuple(path for path in params if path not in taken)
    return SavedWeights(start, taken, frozenset(masters) & frozenset(taken), fresh, num_bytes, differs)


def _arrays(sharding: ShardingPlan) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the parameters by path; an encoded one as the array that it stands for."""
    arrays = (each.array for each in sharding.parameters)
    return {x.path: jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays}


def base_place(declared: str | None, recorded: str | None) -> str | None:
    """Returns the place of the base of an adapter; None if it was drawn. recorded: its place when the adapter was
    saved. Raises ConfigError if it is not there any more."""
    place = declared or recorded
    if place and is_published(place) and not Path(place.removeprefix(PUBLISHED)).exists():
        what = f"the base of this adapter was in {place.removeprefix(PUBLISHED)}, and there is no such folder now"
        raise ConfigError([Problem("checkpoint.base_from", what, "name the folder to which it moved: model.path=DIR")])
    return place


def _rounded(folder: WeightsFolder) -> tuple[str, ...]:
    """Returns a line about the numbers of a GGUF file that few bits have left."""
    types = (
        sorted({tensor.dtype for tensor in folder.gguf_header.tensors.values()} - PLAIN.keys()) if folder.gguf else ()
    )
    what = "the file holds numbers in few bits; training and export go on from what they stand for"
    return (f"warning: {what}: {human_names(types)}",) if types else ()


def _read_as_bytes(data: DataSpec, vocab_size: int, folder: WeightsFolder) -> tuple[str, ...]:
    """Returns a line where texts are read as bytes, and a published model has another tokenizer, which is not there."""
    own = ("tokenizer.json", "tokenizer.model")
    there = folder.adapter or folder.path
    is_known = (there / "export.json").is_file() or any(file.name in own for file in folder.tokenizer)
    is_read = isinstance(data.tokenizer, BytesTokenizer) and data.source.kind != "synthetic"
    if is_known or not is_read:
        return ()
    from ..data.tokenizers import Bytes  # noqa: PLC0415 (it imports grain, and takes a second)

    if vocab_size <= Bytes.identity.vocab_size:
        return ()
    what = f"{there} has no tokenizer that is read, and texts are read as bytes"
    return (f"warning: {what}; name the model's own: data/tokenizer=huggingface data.tokenizer.path=DIR",)


OF_A_DRAW = ("dropout_rate", "initializer_stddev")  # keys that change no output of weights that are there


def _differences(there: Mapping[str, Any], model: Config, of: str) -> tuple[str, ...]:
    """Returns a line for the keys of a model by which it computes something else with the same weights."""
    here = model.model_dump(mode="json")
    changed = [key for key in there if key in here and key not in OF_A_DRAW and not _same(there[key], here[key])]
    named = [f"{key} {here[key]} here, {there[key]} there" for key in changed]
    return (f"warning: the model differs from that of {of}: {human_names(named)}",) if named else ()


def not_read(names: Collection[str]) -> tuple[str, ...]:
    """Returns a line about the tensors of a folder that are of parts that the model does not have."""
    if not names:
        return ()
    return (f"not read, as the model has no such part: {human_names(sorted(names), 2)}",)


def _same(a: Any, b: Any) -> bool:
    return list(a) == list(b) if isinstance(a, list | tuple) and isinstance(b, list | tuple) else a == b


def check_content(weights: StoredWeights, processes: Processes) -> None:
    """Raises RunFailed in all processes if a checkpoint is not as it was saved. Process 0 reads every byte of it; a
    published file has no hashes to compare with."""

    def check() -> None:
        if isinstance(weights, PublishedWeights) or not processes.is_first:
            return
        if damage := damage_in(weights.start.path, expected=EXPECTED, step=weights.start.step):
            fix = f"choose another checkpoint with {FROM}=RUN_DIR/checkpoints/STEP"
            raise RunFailed(Problem(weights.place, damage, fix), STORAGE)

    together("content of the weights", check, processes=processes)


def describe_weights(weights: StoredWeights) -> list[str]:
    """Returns the lines that say what is read, and what is not."""
    fresh = [path for path in weights.fresh if not is_adapter(path) and not is_counted(path)]
    drawn = [f"drawn anew: {human_names(fresh)}"] if fresh else []
    return [f"weights: {weights}", *weights.differs, *drawn]
