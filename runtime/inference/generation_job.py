"""Checks what is to be generated before any weight is read: plan, tokenizer, prompts, the place of the weights."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem, all_of, raise_if_any
from meshloom.compiler.core.places import is_published
from meshloom.compiler.core.visible import write_error
from meshloom.compiler.declare.data_spec import (
    ChatsSource,
    DataSpec,
    HuggingFaceTokenizer,
    OneSource,
    SentencePieceTokenizer,
)
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.declare.sections import GENERATE, GenerateSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.plan import Plan
from meshloom.compiler.step.decode import check_generates

from ..core.inputs import find_file, problem_of_file, records, text_lines
from ..data.chat_template import ChatError, Messages
from ..data.chats import ChatReader, chat_reader
from ..data.messages import check_messages
from ..data.store import read_index
from ..data.tokenize import chat_tokens
from ..data.tokenizers import Bytes, HuggingFace, SentencePiece, Tokenizer, open_tokenizer
from .generate import Completion, Generator, Piece, Prompt, problems_of_prompt
from .open_weights import Session, open_weights, place_of_weights, start_session

GENERATION_CONFIG = "generation_config.json"  # of a published model: the tokens that end its texts, beside others


@dataclass(frozen=True)
class GenerationJob:
    """The completions to generate, after all checks of their declaration. ends: the tokens that end a completion."""

    session: Session
    tokenizer: Tokenizer
    prompts: tuple[Prompt, ...]
    ends: frozenset[int]

    def run(self, console: Console) -> Iterator[Piece | Completion]:
        """Opens the weights, and yields the text of each prompt while it is made. Raises ConfigError for weights of
        another model, RunFailed if the programs need more memory than there is."""
        identity = {f"data.tokenizer.{key}": value for key, value in asdict(self.tokenizer.identity).items()}
        params = open_weights(self.session, console, identity).params
        generator = Generator(self.session, params, self.tokenizer, self.ends, console)
        return generator.run(self.prompts, self.session.plan.spec.generate)


def prepare_generation(
    spec: RunSpec, texts: Sequence[str] | None = None, warn: Callable[[str], None] = write_error
) -> GenerationJob:
    """Returns the job of a declaration. Raises ConfigError with all problems.

    texts: the prompts; None: those that the declaration names. warn: takes a warning about attached devices.
    """

    def planned() -> Plan[RunSpec]:
        plan = plan_run(spec)
        check_generates(plan.spec, plan.model, plan.ops)
        return plan

    plan, tokenizer, given, *_ = all_of(
        planned,
        lambda: tokenizer_of(spec.data),
        lambda: (
            declared_prompts(spec.generate)
            if texts is None
            else [DeclaredPrompt(f"prompt {n}", t) for n, t in enumerate(texts, 1)]
        ),
        lambda: place_of_weights(spec.checkpoint),
    )
    known, there = spec.model.vocab_size, tokenizer.identity.vocab_size
    if there > known:
        what = f"it has {there:,} tokens, and the model has {known:,}"
        raise ConfigError([Problem("data.tokenizer", what, "name the tokenizer that the model was trained with")])
    maker = PromptMaker.of(spec, tokenizer)
    prompts = all_of(*(partial(maker.make, each) for each in given))
    raise_if_any(
        problem
        for each, prompt in zip(given, prompts, strict=True)
        for problem in problems_of_prompt(prompt, plan.model.max_length, known, each.where)
    )
    is_chat = any(not isinstance(each.content, str) for each in given)
    if is_chat and maker.chats.unread:
        warn(f"the chat template does not read {' or '.join(maker.chats.unread)}")
    return GenerationJob(start_session(spec, warn), tokenizer, prompts, maker.ends(is_chat=is_chat))


def tokenizer_of(data: DataSpec) -> Tokenizer:
    """Returns the tokenizer of a declaration: the one that it names, or that of its token shards. Raises ConfigError
    where there is none."""
    if data.tokenizer is not None:
        return open_tokenizer(data.tokenizer)
    source = data.source
    sources: list[OneSource] = [each.source for each in source.parts.values()] if source.kind == "mixture" else [source]
    shards = next((each for each in sources if each.kind == "tokens"), None)
    if shards is None:
        fix = "name the one of the model: data/tokenizer=bytes, or data/tokenizer=huggingface data.tokenizer.path=FILE"
        what = f"there is none: the data of the run are of kind {source.kind}"
        raise ConfigError([Problem("data.tokenizer", what, fix)])
    folder, where = Path(shards.directory), "data.source.directory"
    stored = read_index(folder, where).tokenizer
    if stored.kind == "bytes":
        return Bytes()
    name = {"huggingface": "tokenizer.json", "sentencepiece": "tokenizer.model"}.get(stored.kind)
    if name is None or not (folder / name).is_file():
        what = f"{folder} holds tokens of a tokenizer of kind {stored.kind}, and not its file"
        raise ConfigError([Problem(where, what, "name it: data/tokenizer=huggingface data.tokenizer.path=FILE")])
    path = str(folder / name)
    if stored.kind == "huggingface":
        return HuggingFace(HuggingFaceTokenizer(kind="huggingface", path=path, end_of_document=None))
    return SentencePiece(SentencePieceTokenizer(kind="sentencepiece", path=path, end_of_document=None))


@dataclass(frozen=True)
class DeclaredPrompt:
    """A prompt as it was given. where: its place, for messages. content: a text, or the messages of a chat. record: its
    line, with what a template may want besides."""

    where: str
    content: str | Messages
    record: Mapping[str, Any] = field(default_factory=dict)


def declared_prompts(settings: GenerateSpec) -> list[DeclaredPrompt]:
    """Returns the prompts that the declaration names. Raises ConfigError where there is none, or for a file that cannot
    be read."""
    given = [key for key in ("prompt", "chat", "prompts") if getattr(settings, key) is not None]
    if len(given) > 1:
        what = f"there is a {GENERATE}.{given[0]}, too"
        raise ConfigError([Problem(f"{GENERATE}.{given[1]}", what, "give one of them")])
    if settings.prompt is not None:
        return [DeclaredPrompt(f"{GENERATE}.prompt", settings.prompt)]
    if settings.chat is not None:
        return [DeclaredPrompt(f"{GENERATE}.chat", [{"role": "user", "content": settings.chat}])]
    if settings.prompts is None:
        fix = 'give one: prompt="Once upon a time", or a file of prompts: prompts=FILE'
        raise ConfigError([Problem(f"{GENERATE}.prompt", "there is no prompt", fix)])
    return _read_prompts(settings.prompts)


def _read_prompts(place: str) -> list[DeclaredPrompt]:
    where = f"{GENERATE}.prompts"
    file, found, problems = find_file(place, where), list[DeclaredPrompt](), list[Problem]()
    try:
        if file.is_named_json or file.is_table:
            for each, record in records(file, where):
                try:
                    found.append(_prompt_of(each, record))
                except ChatError as error:
                    problems.append(Problem(each, error.what, error.fix))
                except ConfigError as error:
                    problems += error.problems
        else:
            lines = ((number, line.rstrip(b"\r\n").decode()) for number, line in text_lines(file))
            found += [DeclaredPrompt(f"{file.place}:{number}", line) for number, line in lines]
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(where, f"{file.place} is not UTF-8", "convert it to UTF-8")]) from error
    except Exception as error:
        problem = problem_of_file(error, file)
        raise ConfigError([Problem(where, f"{file.place} {problem.what}", problem.fix)]) from error
    raise_if_any(problems)
    if not found:
        raise ConfigError([Problem(where, f"{file.place} is empty", "write a prompt on each line")])
    return found


def _prompt_of(where: str, record: Mapping[str, Any] | Problem) -> DeclaredPrompt:
    """Returns the prompt of a record. Raises ConfigError for a line that is not JSON, ChatError for a record without a
    prompt."""
    if isinstance(record, Problem):
        raise ConfigError([record])
    key = next((key for key in ("messages", "prompt") if key in record), None)
    if key is None:
        there = ", ".join(map(str, record)) or "no keys"
        raise ChatError("has no key 'prompt', and no 'messages'", f'write {{"prompt": "..."}}; it has {there}')
    if key == "prompt" and isinstance(record[key], str):
        return DeclaredPrompt(where, record[key])
    return DeclaredPrompt(where, check_messages(record[key], key), record)


@dataclass
class PromptMaker:
    """Turns prompts into tokens. has_start: the model was trained on texts with the tokens before them that the
    tokenizer's file declares: a published model, or one of chats."""

    tokenizer: Tokenizer
    spec: RunSpec
    has_start: bool

    @classmethod
    def of(cls, spec: RunSpec, tokenizer: Tokenizer) -> Self:
        """Returns what makes the prompts of a declaration's weights."""
        is_of_published = is_published(spec.checkpoint.weights_from or "")
        return cls(tokenizer, spec, has_start=is_of_published or isinstance(spec.data.source, ChatsSource))

    def make(self, given: DeclaredPrompt) -> Prompt:
        """Returns a prompt with its tokens. An empty one begins a document: it is the end of the one before. Raises
        ConfigError for a chat that cannot be written."""
        if isinstance(given.content, str):
            (tokens,) = self.tokenizer.encode_texts([given.content.encode(errors="replace")])
            start = self.tokenizer.around[0] if self.has_start and isinstance(self.tokenizer, HuggingFace) else []
            whole = (*start, *map(int, tokens))
            return Prompt(given.content, whole or (self.tokenizer.identity.end_of_document,))
        try:
            chat = self.chats.template.opening(given.content, self.chats.extra(given.record))
            assert isinstance(self.tokenizer, HuggingFace)
            ((tokens, _),) = chat_tokens(self.tokenizer).encode([chat])
        except ChatError as error:
            raise ConfigError([Problem(given.where, error.what, error.fix)]) from error
        return Prompt(self.tokenizer.hidden.show(chat.text), tuple(map(int, tokens)), is_chat=True)

    def ends(self, *, is_chat: bool) -> frozenset[int]:
        """Returns the tokens that end a completion: that of a document, those that the folder of a published model
        names, and for chats the one that the template writes after an answer."""
        ends = {self.tokenizer.identity.end_of_document}
        if isinstance(self.tokenizer, HuggingFace):
            ends |= _declared_ends(self.tokenizer.folder / GENERATION_CONFIG)
            ends |= self._ends_of_answers() if is_chat else set()
        return frozenset(ends)

    @cached_property
    def chats(self) -> ChatReader:
        """Returns what writes chats by the template that the declaration chooses."""
        source, where = self.spec.data.source, "data.source"
        if not isinstance(source, ChatsSource):
            source = ChatsSource(kind="chats", paths=("-",), template=None, variables={}, date=None)
        return chat_reader(source, where, self.tokenizer)

    def _ends_of_answers(self) -> set[int]:
        assert isinstance(self.tokenizer, HuggingFace)
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            ((tokens, trained),) = chat_tokens(self.tokenizer).encode([self.chats.template.chat(messages, {})])
        except ChatError:  # a template that refuses such a chat
            return set()
        learnt = [int(token) for token, is_learnt in zip(tokens, trained, strict=True) if is_learnt]
        return {token for token in learnt[-1:] if token in self.tokenizer.special.values()}


def _declared_ends(path: Path) -> set[int]:
    try:
        declared = json.loads(path.read_bytes()).get("eos_token_id")
    except (OSError, ValueError, AttributeError):  # without the file, the tokenizer alone says what ends a text
        return set()
    found = declared if isinstance(declared, list) else [declared]
    return {token for token in found if isinstance(token, int)}
