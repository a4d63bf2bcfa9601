"""Declares the data of a run: where documents come from, how they become tokens, and how tokens become sequences."""

from datetime import date
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, PositiveFloat, PositiveInt

from meshloom.models.config import Config, mistake

from ..core.config_types import LocalPath, NumBytes, Place, Seed, ShardsPlace, Text, WrittenShardsPlace
from ..spec.step_spec import BatchSpec


def _not_empty(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Refuses an empty list; a bound of pydantic's would also count the places that were refused."""
    if paths:
        return paths
    raise mistake("is empty", "give at least 1")


# Files, or glob patterns, in which ** matches all folders; also URLs of them
Paths = Annotated[tuple[Place, ...], AfterValidator(_not_empty)]


class PythonStdlibSource(Config):
    """The source files of the running Python's standard library."""

    kind: Literal["python_stdlib"]


class SyntheticSource(Config):
    """Documents of a small random grammar."""

    kind: Literal["synthetic"]


class TextFilesSource(Config):
    """Text files; each file is a document."""

    kind: Literal["text_files"]
    paths: Paths


class JsonlSource(Config):
    """JSON lines; each line of each file is an object, and its `text_key` is a document."""

    kind: Literal["jsonl"]
    paths: Paths
    text_key: Text


def _date(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise mistake(f"'{text}' is not a date", "give year, month and day, such as 2026-07-26") from error


class ChatsSource(Config):
    """JSON lines; each line is a chat under `messages`, or has a `prompt` and a `completion`. Only what the model says
    is trained on."""

    kind: Literal["chats"]
    paths: Paths
    template: Text | None  # a file, or a name among the templates of the tokenizer's folder; None: its default
    variables: dict[str, JsonValue]  # of the template
    date: Annotated[Text, AfterValidator(_date)] | None  # that a template may write; None: today


class PreferencesSource(ChatsSource):
    """JSON lines; each has a `chosen` and a `rejected` answer to a `prompt`, or two whole chats that begin alike."""

    kind: Literal["preferences"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)


class ParquetSource(Config):
    """Parquet files; each row is a document: the text in `text_column`."""

    kind: Literal["parquet"]
    paths: Paths
    text_column: Text


class ArrayRecordSource(Config):
    """ArrayRecord files; each record is a document, its text in UTF-8."""

    kind: Literal["array_record"]
    paths: Annotated[tuple[LocalPath, ...], AfterValidator(_not_empty)]


class TokensSource(Config):
    """Token shards that `meshloom data` wrote, read memory-mapped; those behind a URL are downloaded first."""

    kind: Literal["tokens"]
    directory: ShardsPlace


class PythonSource(Config):
    """A user's class with `__len__` and `__getitem__`; docs/data.md says what an item is."""

    kind: Literal["python"]
    object: Text  # my_package.data:Documents
    arguments: dict[str, JsonValue]  # arguments of its constructor
    items: Literal["documents", "sequences"]  # documents are read at the start, sequences when they are needed


OneSource = Annotated[
    PythonStdlibSource | SyntheticSource | TextFilesSource | JsonlSource | ChatsSource | PreferencesSource
    | ParquetSource | ArrayRecordSource | TokensSource | PythonSource,
    Field(discriminator="kind"),
]  # fmt: skip


class MixturePart(Config):
    weight: PositiveFloat  # its share of the sequences, before weights are scaled to a sum of 1
    source: OneSource


class MixtureSource(Config):
    """A mixture of named parts, sampled by weight."""

    kind: Literal["mixture"]
    parts: Annotated[dict[str, MixturePart], Field(min_length=1)]


Source = Annotated[
    PythonStdlibSource | SyntheticSource | TextFilesSource | JsonlSource | ChatsSource | PreferencesSource
    | ParquetSource | ArrayRecordSource | TokensSource | PythonSource | MixtureSource,
    Field(discriminator="kind"),
]  # fmt: skip


class BytesTokenizer(Config):
    """A token for each byte, and one for the end of a document."""

    kind: Literal["bytes"]


class HuggingFaceTokenizer(Config):
    """A JSON file of the `tokenizers` library, alone or in the folder of a published model."""

    kind: Literal["huggingface"]
    path: LocalPath
    end_of_document: Text | None  # a token, as <|endoftext|>; None: that of the folder, or the file's only special one


class SentencePieceTokenizer(Config):
    """A `.model` file of SentencePiece."""

    kind: Literal["sentencepiece"]
    path: LocalPath
    end_of_document: Text | None  # a token, as </s>; None: the file's own end-of-sentence token


TokenizerSpec = Annotated[BytesTokenizer | HuggingFaceTokenizer | SentencePieceTokenizer, Field(discriminator="kind")]


class DataSpec(BatchSpec):
    source: Source
    tokenizer: TokenizerSpec | None  # None: the source holds tokens already
    packing: Literal["concatenate", "first_fit", "pairs"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    isolate_documents: bool  # batches mark where documents begin; the last token of a document has no target
    held_out_fraction: Annotated[float, Field(ge=0, lt=1)]  # 0: nothing is held out or evaluated
    held_out_by: Literal["document", "position"]  # whole documents, by their names, or the last tokens of each source
    shuffle_seed: Seed
    num_epochs: PositiveInt | None  # None: without end
    max_text_bytes: NumBytes  # the most text that is tokenized at the start of a run
    num_prefetch_threads: PositiveInt
    num_prefetch_batches: PositiveInt

    @property
    def gives_sequences(self) -> bool:
        """Returns True if a class of the user, or one of a mixture, returns whole sequences."""
        parts = [each.source for each in self.source.parts.values()] if self.source.kind == "mixture" else [self.source]
        return any(part.kind == "python" and part.items == "sequences" for part in parts)


class ShardsSpec(Config):
    """The token shards that `meshloom data` writes and `data=tokens` reads."""

    directory: WrittenShardsPlace
    num_tokens_per_shard: NumBytes  # approximately: a document is never split over shards
    bpe_vocab_size: PositiveInt | None  # a byte-level BPE of this size is trained on the corpus first
    bpe_text_bytes: NumBytes  # the approximate part of the corpus that it is trained on
