"""Measures how fast batches are drawn for each source and packing, and text becomes tokens, beside a training process.

    python bench/data.py [seconds per case]

The text is the Python standard library's own source, in temporary files of each format. Batches are of 8 sequences of
2,048 tokens, drawn in one prefetch thread; every figure is of one process on this machine.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from array_record.python.array_record_module import ArrayRecordWriter

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.user_imports import code_allowed_from
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.runtime.cli.data import prepare_corpus, tokenize_corpus
from meshloom.runtime.data import open_data
from meshloom.runtime.data.documents import parts_of

SHAPE = ("sequence_length=2048", "global_batch_size=8", "evaluation.num_batches=1", "model.vocab_size=8192")
BPE = ("data/tokenizer=huggingface", "data.tokenizer.path=bpe/tokenizer.json")
SOURCES = {
    "jsonl, bytes": ("data=jsonl", "data.source.paths=[text.jsonl]"),
    "parquet, bytes": ("data=parquet", "data.source.paths=[text.parquet]"),
    "array_record, bytes": ("data=array_record", "data.source.paths=[text.array_record]"),
    "jsonl, BPE 8,192": ("data=jsonl", "data.source.paths=[text.jsonl]", *BPE),
    "tokens, BPE 8,192": ("data=tokens", "data.source.directory=bpe"),
    "python sequences": ("data=python", "data.source.object=bench_sequences:Sequences", "data.source.items=sequences"),
}
SEQUENCES = """
from meshloom.runtime.data import DataSource

class Sequences(DataSource):
    def __init__(self):
        import numpy
        self.tokens = numpy.arange(2049) % 8192
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        return self.tokens
"""


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3.0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        num_bytes = _write_texts()
        print(f"{num_bytes / 1e6:.1f} MB of text")
        for name, words in {"bytes": (), "BPE 8,192": BPE}.items():
            if name != "bytes":
                _tokenize("bpe", "data=jsonl", "data.source.paths=[text.jsonl]", "shards.bpe_vocab_size=8192")
            start = time.perf_counter()
            _tokenize(f"again {name}", "data=jsonl", "data.source.paths=[text.jsonl]", *words)
            print(f"meshloom data, {name:12} {num_bytes / 1e6 / (time.perf_counter() - start):8.1f} MB/s")
        with code_allowed_from(["bench_sequences"]):
            _draw_all(seconds)


def _draw_all(seconds: float) -> None:
    for name, words in SOURCES.items():
        for packing in ("concatenate", "first_fit"):
            for isolate in ("false", "true"):
                _draw(name, seconds, packing, isolate, *words)


def _spec(*words: str, then: Any = lambda spec: spec) -> RunSpec:
    return read_spec(Request((*SHAPE, *words)), then=then)


def _tokenize(directory: str, *words: str) -> None:
    job = prepare_corpus(_spec(*words, f"shards.directory='{directory}'"))
    tokenize_corpus(job, Console(is_quiet=True))


def _draw(name: str, seconds: float, packing: str, isolate: str, *words: str) -> None:
    spec = _spec(*words, f"data.packing={packing}", f"data.isolate_documents={isolate}")
    start = time.perf_counter()
    data = open_data(spec)
    opened = time.perf_counter()
    batches, count = iter(data["train"]), 0
    next(batches)
    begun = time.perf_counter()
    while time.perf_counter() < begun + seconds:
        next(batches)
        count += 1
    rate = count * spec.tokens_per_step / (time.perf_counter() - begun)
    print(f"{name:20} {packing:12} isolate_documents={isolate:5}  opened in {opened - start:5.2f} s  {rate / 1e6:7.1f} M tokens/s")  # fmt: skip  # noqa: E501


def _write_texts() -> int:
    source: Any = _spec().data.source
    texts: list[str] = []
    for part in parts_of(source, "data.source"):
        for document in part.read(0):
            text = getattr(document, "content", b"")
            texts.append(text.decode(errors="ignore"))
    Path("text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), "text.parquet")
    writer = ArrayRecordWriter("text.array_record", "group_size:1")
    for text in texts:
        writer.write(text.encode())
    writer.close()
    Path("bench_sequences.py").write_text(SEQUENCES)
    return sum(len(text.encode()) for text in texts)


if __name__ == "__main__":
    main()
