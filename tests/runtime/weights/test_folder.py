"""Every kind of damage in a folder of published weights is one clear error, found without reading a tensor."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from meshloom.compiler.core.errors import ConfigError
from meshloom.runtime.weights.folder import INDEX, SINGLE, open_folder

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
RNG = np.random.default_rng(0)
TENSORS = {
    "a": RNG.standard_normal((3, 5)).astype(ml_dtypes.bfloat16),
    "b": RNG.standard_normal(7).astype(np.float32),
    "c": RNG.standard_normal((2, 3, 2)).astype(np.float16),
    "empty": np.zeros((0, 4), np.float32),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two files with an index, which the safetensors library wrote."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    parts = ({"a": TENSORS["a"]}, {name: TENSORS[name] for name in ("b", "c", "empty")})
    for file, part in zip(FILES, parts, strict=True):
        save_file(part, tmp_path / file, {"format": "pt"})
    listed = {name: file for file, part in zip(FILES, parts, strict=True) for name in part}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def _single(folder: Path, header: object, content: bytes = b"", *, length: int | None = None) -> None:
    """Makes the folder one of a single file, with this header."""
    for name in (*FILES, INDEX):
        (folder / name).unlink()
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / SINGLE).write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + content)


def _entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_are_those_that_the_library_wrote(folder):
    opened = open_folder(folder)
    assert {name: t.shape for name, t in opened.tensors.items()} == {name: x.shape for name, x in TENSORS.items()}
    for name, expected in TENSORS.items():
        values = opened.tensors[name].values()
        assert values.dtype == expected.dtype
        assert values.tobytes() == expected.tobytes()
    assert opened.num_bytes == sum(x.nbytes for x in TENSORS.values())
    assert [path.name for path in opened.tokenizer] == ["tokenizer.json"]


def _truncate(folder: Path) -> None:
    (folder / FILES[0]).write_bytes((folder / FILES[0]).read_bytes()[:-3])


def _lose_file(folder: Path) -> None:
    (folder / FILES[1]).unlink()


def _list_what_is_not_there(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["d"] = FILES[0]
    (folder / INDEX).write_text(json.dumps(index))


def _leave_unlisted(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["b"]
    (folder / INDEX).write_text(json.dumps(index))


def _hold_twice(folder: Path) -> None:
    save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, folder / FILES[0])


def _hold_both(folder: Path) -> None:
    save_file({"a": TENSORS["a"]}, folder / SINGLE)


def _hold_a_pickle(folder: Path) -> None:
    for name in (*FILES, INDEX):
        (folder / name).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _lose_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _break_config(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")


DAMAGE = {
    "truncated data": (_truncate, f"{FILES[0]}: is truncated: its tensors take"),
    "truncated header": (lambda f: _single(f, b'{"a"', length=99), "is truncated: its header has 99 bytes"),
    "empty file": (lambda f: _single(f, {}) or (f / SINGLE).write_bytes(b""), "is not a safetensors file"),
    "another format": (lambda f: _single(f, {}) or (f / SINGLE).write_bytes(b"GGUF" * 9), "is not a safetensors"),
    "a pointer": (lambda f: _single(f, {}) or (f / SINGLE).write_bytes(b"version https://git-lfs"), "git lfs pull"),
    "no JSON": (lambda f: _single(f, b"{'a': 1}"), "its header is not JSON"),
    "nested JSON": (lambda f: _single(f, b"[" * 100_000), "its header is not JSON"),
    "a list": (lambda f: _single(f, [1]), "its header is not a JSON object"),
    "no offsets": (lambda f: _single(f, {"a": {"dtype": "F32", "shape": [1]}}), "describes a in a form"),
    "negative": (lambda f: _single(f, {"a": _entry([-1], 0, 4)}), "describes a in a form"),
    "a size that is not": (lambda f: _single(f, {"a": _entry([2], 0, 4)}, b"1234"), "gives a, F32 [2], 4 bytes"),
    "unknown type": (lambda f: _single(f, {"a": _entry([1], 0, 4, "F33")}, b"1234"), "did you mean 'F32'?"),
    "overlap": (
        lambda f: _single(f, {"a": _entry([2], 0, 8), "b": _entry([2], 4, 12)}, bytes(12)),
        "places b over another tensor",
    ),
    "a hole": (lambda f: _single(f, {"a": _entry([1], 4, 8)}, bytes(8)), "leaves 4 bytes before a"),
    "more behind": (lambda f: _single(f, {"a": _entry([1], 0, 4)}, bytes(9)), "has 5 bytes after its last tensor"),
    "twice in a header": (
        lambda f: _single(f, b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "a": 1}'),
        "names a twice in its header",
    ),
    "a lost file": (_lose_file, f"names {FILES[1]}, which is not in the folder"),
    "a lost tensor": (_list_what_is_not_there, f"names d in {FILES[0]}, and {FILES[0]} does not hold it"),
    "an unlisted tensor": (_leave_unlisted, f"does not list b of {FILES[1]}"),
    "a tensor in two files": (_hold_twice, f"holds b, which {FILES[0]} holds too"),
    "two answers": (_hold_both, "nothing says which are the weights"),
    "a pickle": (_hold_a_pickle, "pytorch_model.bin, a pickle, which may run any code"),
    "no config": (_lose_config, "config.json: cannot be read"),
    "another config": (_break_config, "config.json: is not a JSON object"),
    "a broken index": (lambda f: (f / INDEX).write_text("{}"), "it has no weight_map"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(folder, damage):
    make, said = DAMAGE[damage]
    make(folder)
    with pytest.raises(ConfigError) as raised:
        open_folder(folder)
    assert said in str(raised.value)
    assert all(problem.where.startswith(str(folder)) for problem in raised.value.problems)


def test_all_damage_is_named_at_once(folder):
    _truncate(folder)
    _lose_config(folder)
    with pytest.raises(ConfigError) as raised:
        open_folder(folder)
    assert len(raised.value.problems) == 2


def test_a_folder_that_is_not_there_says_what_to_name(tmp_path):
    with pytest.raises(ConfigError, match="there is no such folder"):
        open_folder(tmp_path / "nothing")
