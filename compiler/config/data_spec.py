"""What a run is trained on, declared: where documents come from, how they become tokens, and tokens sequences."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, PositiveFloat, PositiveInt

from meshloom.models.config import Config

from ..core.config_types import NumBytes, Seed, Text

Paths = Annotated[tuple[Text, ...], Field(min_length=1)]  # files, or patterns as a shell has them; ** for all folders


class PythonStdlibSource(Config):
    """The source files of the running Python's standard library."""

    kind: Literal["python_stdlib"]


class SyntheticSource(Config):
    """Documents of a small random grammar."""

    kind: Literal["synthetic"]


class TextFilesSource(Config):
    """Each file is a document."""

    kind: Literal["text_files"]
    paths: Paths


class JsonlSource(Config):
    """Each line of each file (`.gz` or not) is a JSON object, and its `text_key` a document."""

    kind: Literal["jsonl"]
    paths: Paths
    text_key: Text


class ParquetSource(Config):
    """Each row of each file is a document: the text in `text_column`."""

    kind: Literal["parquet"]
    paths: Paths
    text_column: Text


class ArrayRecordSource(Config):
    """Each record of each file is a document: its text in UTF-8."""

    kind: Literal["array_record"]
    paths: Paths


class TokensSource(Config):
    """What `meshloom data` wrote: shards of tokens, read memory-mapped."""

    kind: Literal["tokens"]
    directory: Text


class PythonSource(Config):
    """A class of the user's own with `__len__` and `__getitem__`; docs/data.md says what an item is."""

    kind: Literal["python"]
    object: Text  # my_package.data:Documents
    arguments: dict[str, JsonValue]  # of its constructor
    items: Literal["documents", "sequences"]  # documents are read at the start; sequences when they are needed


OneSource = Annotated[
    PythonStdlibSource | SyntheticSource | TextFilesSource | JsonlSource | ParquetSource | ArrayRecordSource
    | TokensSource | PythonSource,
    Field(discriminator="kind"),
]  # fmt: skip


class MixturePart(Config):
    weight: PositiveFloat  # its share of the sequences, before weights are scaled to a sum of 1
    source: OneSource


class MixtureSource(Config):
    """Parts by name, drawn from by weight."""

    kind: Literal["mixture"]
    parts: Annotated[dict[str, MixturePart], Field(min_length=1)]


Source = Annotated[
    PythonStdlibSource | SyntheticSource | TextFilesSource | JsonlSource | ParquetSource | ArrayRecordSource
    | TokensSource | PythonSource | MixtureSource,
    Field(discriminator="kind"),
]  # fmt: skip


class BytesTokenizer(Config):
    """A token per byte, and one for the end of a document."""

    kind: Literal["bytes"]


class HuggingFaceTokenizer(Config):
    """A JSON file of the `tokenizers` library."""

    kind: Literal["huggingface"]
    path: Text
    end_of_document: Text | None  # a token, as <|endoftext|>; None: the only special token of the file


class SentencePieceTokenizer(Config):
    """A `.model` file of SentencePiece."""

    kind: Literal["sentencepiece"]
    path: Text
    end_of_document: Text | None  # a token, as </s>; None: the file's own end-of-sentence token


TokenizerSpec = Annotated[BytesTokenizer | HuggingFaceTokenizer | SentencePieceTokenizer, Field(discriminator="kind")]


class DataSpec(Config):
    source: Source
    tokenizer: TokenizerSpec | None  # None: the source holds tokens already
    packing: Literal["concatenate", "first_fit"]  # of documents into sequences
    isolate_documents: bool  # batches say where documents begin; the last token of one predicts nothing
    held_out_fraction: Annotated[float, Field(gt=0, lt=1)]  # of the documents
    shuffle_seed: Seed
    num_epochs: PositiveInt | None  # None: no end
    max_text_bytes: NumBytes  # of text that is tokenised at the start of a run
    num_prefetch_threads: PositiveInt
    num_prefetch_batches: PositiveInt


class ShardsSpec(Config):
    """What `meshloom data` writes, and `data=tokens` reads."""

    directory: Text
    num_tokens_per_shard: NumBytes  # about: a document is never split over shards
    bpe_vocab_size: PositiveInt | None  # a byte-level BPE of this size is trained on the corpus first
    bpe_text_bytes: NumBytes  # of the corpus that it is trained on, about
