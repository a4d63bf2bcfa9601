"""An artifact whose files hold something else is refused in one sentence, whatever it is, and never loaded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.xla.aot import Built
from meshloom.compiler.xla.programs import Fingerprint
from meshloom.runtime.compile.artifact import EXPECTED, TEXT, read_artifact, write_artifact
from meshloom.runtime.core.files import FILE, damage_in, write_manifest

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "{}": lambda _: b"{}",
    "[]": lambda _: b"[]",
    "null": lambda _: b"null",
    "a number": lambda _: b"7",
    "NUL": lambda content: bytes(len(content)),
    "not UTF-8": lambda _: b'{"\xff": 1}',
    "UTF-16": lambda content: content.decode().encode("utf-16"),
    "deep": lambda _: b"[" * 100_000,
    "a key less": lambda content: json.dumps(dict(list(json.loads(content).items())[:-1])).encode(),
    "a key more": lambda content: json.dumps(json.loads(content) | {"more": 1}).encode(),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    fingerprint = Fingerprint({"train": "0" * 64}, {}, {"jax": "0"}, {}, {}, {"seed": "0"})
    built = Built("HloModule m", None, None, {}, {"train": "it is a test"}, 1.0, ())
    return write_artifact(tmp_path / "artifact", fingerprint, built, ("seed=0",)).place


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [FILE, "fingerprint.json", "built.json"])
@pytest.mark.parametrize("is_listed_anew", [False, True])
def test_any_other_content_is_refused(place, name, damage, is_listed_anew):
    (place / name).write_bytes(DAMAGES[damage]((place / name).read_bytes()))
    if is_listed_anew and name != FILE:  # as someone who edits a file and the manifest
        write_manifest(place)
        if (name, damage) == ("built.json", "a key more"):
            pytest.skip("a key that nothing reads changes nothing")
    with pytest.raises(ConfigError, match=r"is damaged: |was written by another version of Meshloom"):
        read_artifact(place)


def test_a_file_that_the_manifest_does_not_list_is_refused(place):
    (place / "train.executable").write_bytes(b"code of someone else")
    with pytest.raises(ConfigError, match=r"its manifest\.json does not list train\.executable"):
        read_artifact(place)


def test_a_manifest_has_to_list_what_every_artifact_has(place):
    for name in ("fingerprint.json", "built.json", TEXT):
        (place / name).unlink()
    write_manifest(place)
    assert damage_in(place, expected=EXPECTED) == "its manifest.json does not list built.json"
    with pytest.raises(ConfigError, match=r"its manifest\.json does not list built\.json"):
        read_artifact(place)
