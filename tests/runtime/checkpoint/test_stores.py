"""Checkpoints behind URLs, in a store that speaks S3: moto's server, as a process of its own."""

import json
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from conftest import LINEAR_STACK, SMALL, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.runtime.checkpoint.find import finished
from meshloom.runtime.core.files import damage_in, file_sizes, folder_at
from meshloom.runtime.data.corpus import local_copy
from meshloom.runtime.start.start import check_checkpoint
from support.commands import meshloom

pytest.importorskip("moto.server", reason="pip install -e '.[test]'")
s3fs = pytest.importorskip("s3fs", reason="pip install -e '.[test]'")

TINY = (*SMALL, *LINEAR_STACK, "target=cpu-2", "model.num_layers=1", "num_steps=3", "checkpoint.every_num_steps=1",
        "evaluation.num_batches=1")  # fmt: skip
BUCKET = "s3://meshloom-tests"


@pytest.fixture(scope="module")
def store():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    line = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", url.rpartition(":")[2]]
    server = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield _when_it_answers(url)
    finally:
        server.kill()
        server.wait()


def _when_it_answers(url):
    until = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return url
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.1)


@pytest.fixture(autouse=True)
def account(store, monkeypatch):
    values = {"AWS_ENDPOINT_URL": store, "AWS_ACCESS_KEY_ID": "a-key", "AWS_SECRET_ACCESS_KEY": "a-secret",
              "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdirs(BUCKET, exist_ok=True)


@pytest.mark.ci
def test_a_run_is_saved_in_a_bucket_and_resumed_from_it_in_another_directory(tmp_path):
    place = folder_at(f"{BUCKET}/run")
    line = ("train", *TINY, f"checkpoint.directory={place}")
    first = meshloom(*line, f"hydra.run.dir={tmp_path}/a")
    assert first.returncode == 0, first.stderr
    assert [path.name for path in finished(place)] == ["3", "2"]
    assert not (tmp_path / "a" / "checkpoints").exists()
    (place / "3" / "commit_success.txt").unlink()  # as if the save had been cut off before its last file
    second = meshloom(*line, f"hydra.run.dir={tmp_path}/b")
    assert second.returncode == 0, second.stderr
    assert f"continuing after step 2, from {place}/2" in second.stdout
    assert [path.name for path in finished(place)] == ["3", "2"]
    before, again = (json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[-1]) for run in "ab")
    assert (again["step"], again["loss"]) == (3, before["loss"])
    _check_damage(place / "3")


def _check_damage(checkpoint):
    known = {"expected": (), "step": 3}
    assert damage_in(checkpoint, **known) is None
    arrays = next(name for name in file_sizes(checkpoint) if "/d/" in name)
    (checkpoint / arrays).write_bytes(b"")
    assert "has 0 bytes" in str(damage_in(checkpoint, **known))
    (checkpoint / arrays).unlink()
    assert damage_in(checkpoint, **known) == f"{arrays} is missing"


@pytest.mark.ci
def test_a_bucket_that_is_not_there_and_an_account_without_keys_are_errors(monkeypatch):
    problems = []
    for place in (f"{BUCKET}-other/run", f"{BUCKET}/run"):
        with pytest.raises(ConfigError) as error:
            check_checkpoint(spec_of(f"checkpoint.directory={place}", f"checkpoint.restore_from={place}"))
        problems += error.value.problems
        monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
        s3fs.S3FileSystem.clear_instance_cache()
    wheres = ["checkpoint.restore_from", "checkpoint.directory"]
    assert [each.where for each in problems] == wheres * 2
    assert "does not exist" in problems[1].what
    assert "credentials" in problems[3].what


@pytest.mark.ci
def test_shards_of_a_bucket_are_those_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = ("data=synthetic", "shards.num_tokens_per_shard=50000", f"shards.directory={tmp_path}/tokens")
    assert meshloom("data", *source).returncode == 0
    place = f"{BUCKET}/tokens"
    with pytest.raises(ConfigError, match=r"has no index\.json"):
        local_copy(place, "data.source.directory")
    s3fs.S3FileSystem().put(f"{tmp_path}/tokens/", f"{place}/", recursive=True)
    copy = local_copy(place, "data.source.directory")
    names = sorted(path.name for path in copy.iterdir() if path.name != ".lock")
    assert len(names) > 4
    for name in names:
        assert (copy / name).read_bytes() == (tmp_path / "tokens" / name).read_bytes()
