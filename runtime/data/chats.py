"""Reads chats from JSON lines: `messages`, or `prompt` and `completion`, each with what a template may want besides."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from itertools import takewhile
from operator import itemgetter
from typing import Any, ClassVar

from meshloom.compiler.core.errors import ConfigError, Problem, use_one_of
from meshloom.compiler.core.places import PlaceError, expanded
from meshloom.compiler.declare.data_spec import ChatsSource

from ..core.inputs import SourceFile, records, text_of_file
from .chat_template import SWITCHES, Chat, ChatError, ChatTemplate, Messages, check_unicode, plain_chat
from .messages import WRITE, check_messages, is_learnt, parsed_json
from .tokenizers import HuggingFace, Tokenizer

KEYS = ("messages", "prompt", "completion", "chosen", "rejected")
TOOLS = ("tools", "functions")  # of a line: what the model may call
TEMPLATE_ARGUMENTS = "chat_template_kwargs"  # of a line, as the trl library reads them
TODAY = "today"  # beside the ways to find what is trained on
SIDES = ("chosen", "rejected")
NOTHING = Chat("", (), "completion")  # a side of a pair from which nothing can be learnt
WRITE_PAIRS = "write one JSON object per line, with chosen and rejected, and a prompt or chats that begin alike"


@dataclass
class ChatReader:
    """Reads the chats of a source. where: its key."""

    source: ChatsSource
    where: str
    tokenizer: HuggingFace
    chats_per_line: ClassVar[int] = 1
    _unread: dict[str, None] = field(default_factory=dict, init=False)

    @cached_property
    def template(self) -> ChatTemplate:
        """Returns the template. Raises ConfigError if there is none, or it is not valid."""
        source, place = _find_template(self.source.template, self.tokenizer, self.where)
        tokens = self.tokenizer.token_variables
        day = date.fromisoformat(self.source.date) if self.source.date else None
        try:
            return ChatTemplate(source, place, self.tokenizer.hidden, {**tokens, **self.source.variables}, day)
        except ChatError as error:
            raise ConfigError([Problem(f"{self.where}.template", error.what, error.fix)]) from error

    def read(self, file: SourceFile, first: int) -> Iterator[Chat | Problem]:
        """Yields the chats of each record from number `first` on, which counts chats. Raises ConfigError for a chat
        where there is no template."""
        for place, value in records(file, f"{self.where}.paths", first // self.chats_per_line):
            if isinstance(value, Problem):
                yield value
                continue
            try:
                yield from self._chats(value)
            except ChatError as error:
                yield Problem(place, error.what, error.fix)
            except RecursionError:
                yield Problem(place, "is nested too deeply", "write its parts as text")

    @property
    def unread(self) -> tuple[str, ...]:
        """Returns the keys of chats so far that the template has not read, in words."""
        return (*self._unread, *(self.template.unread if "template" in self.__dict__ else ()))

    def _chats(self, line: Mapping[str, Any]) -> Sequence[Chat]:
        """Returns the chats of a line. Raises ChatError."""
        if "messages" in line:
            return [self._rendered(check_messages(line["messages"], "messages"), line)]
        missing = [key for key in ("prompt", "completion") if key not in line]
        if missing:
            has = f"has no key 'messages', and no '{missing[0]}'"
            raise ChatError(has, f"{WRITE}; it has {', '.join(map(str, line)) or 'no keys'}")
        return [self._answered(line, "completion")]

    def _rendered(self, messages: Messages, line: Mapping[str, Any], *, num_given: int = 0) -> Chat:
        extra = self.extra(line)
        return self.template.chat(messages, extra, num_given=num_given, is_learnt=[*map(is_learnt, messages)])

    def extra(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a line gives the template besides its messages."""
        extra = {key: value for key, value in line.items() if key not in (*KEYS, TEMPLATE_ARGUMENTS)}
        arguments = parsed_json(line.get(TEMPLATE_ARGUMENTS) or {}, f"'{TEMPLATE_ARGUMENTS}'")
        if not isinstance(arguments, dict):
            what = f"'{TEMPLATE_ARGUMENTS}' is {type(arguments).__name__}, not an object"
            raise ChatError(what, "write {key: value}")
        extra |= arguments
        for key in (key for key in TOOLS if key in extra):
            tools = None if extra[key] == "" else parsed_json(extra[key], f"'{key}'")
            if not isinstance(tools, list | None):
                raise ChatError(f"'{key}' is {type(tools).__name__}, not a list of tools", "write [{...}, ...]")
            extra[key] = tools and [parsed_json(each, f"'{key}'") for each in tools]
        own = (*self.tokenizer.token_variables, "messages", "add_generation_prompt")
        if refused := [key for key in extra if key in own]:
            raise ChatError(f"sets '{refused[0]}', which the tokenizer sets", "leave it out, or name it otherwise")
        meant = [key for key in (*TOOLS, "documents", *SWITCHES, *arguments) if extra.get(key) is not None]
        self._unread |= {f"'{key}'": None for key in meant if not self.template.does_read(key)}
        return extra

    def _answered(self, line: Mapping[str, Any], key: str) -> Chat:
        """Returns a prompt with the answer under `key`."""
        prompt, answer = line["prompt"], line[key]
        if isinstance(prompt, str) and isinstance(answer, str):
            check_unicode(prompt + answer)
            return plain_chat(prompt, answer)
        given = check_messages(prompt, "prompt")
        return self._rendered([*given, *check_messages(answer, key)], line, num_given=len(given))


class PreferenceReader(ChatReader):
    """Reads pairs of chats: a chosen and a rejected answer to one prompt, one after the other."""

    chats_per_line: ClassVar[int] = 2

    def _chats(self, line: Mapping[str, Any]) -> Sequence[Chat]:
        if missing := [key for key in SIDES if key not in line]:
            there = ", ".join(map(str, line)) or "no keys"
            raise ChatError(f"has no key '{missing[0]}'", f"{WRITE_PAIRS}; it has {there}")
        prompt, answers = line.get("prompt"), [line[key] for key in SIDES]
        if answers[0] == answers[1]:
            return [NOTHING, NOTHING]
        if all(isinstance(answer, str) for answer in answers) and isinstance(prompt, str | None):
            check_unicode("".join((prompt or "", *answers)))
            length = _length_shared(*answers) if prompt is None else 0
            pair = [plain_chat(answer[:length] if prompt is None else prompt, answer[length:]) for answer in answers]
        else:
            chats, num_given = self._whole(prompt, [check_messages(line[key], key) for key in SIDES])
            if num_given in map(len, chats):  # one side is the beginning of the other
                return [NOTHING, NOTHING]
            pair = [self._rendered(chat, line, num_given=num_given) for chat in chats]
        # A pair is learnt from as one: without something to learn in both, neither is kept.
        return pair if all(chat.trained for chat in pair) else [NOTHING, NOTHING]

    def _whole(self, prompt: Any, sides: Sequence[Messages]) -> tuple[list[Messages], int]:
        """Returns both chats with their prompt, and the number of its messages. The sides may be whole chats, or
        answers alone; beside whole chats, a prompt repeats how they begin."""
        shared = [*map(itemgetter(0), takewhile(lambda both: both[0] == both[1], zip(*sides, strict=False)))]
        if isinstance(prompt, str):
            if any(message["role"] == "user" for message in shared):
                return [*sides], len(shared)
            given: Messages = [*shared, {"role": "user", "content": prompt}]
            return [[*given, *side[len(shared) :]] for side in sides], len(given)
        if prompt is None:
            return [*sides], len(shared)
        given = check_messages(prompt, "prompt")
        if [*shared[: len(given)]] == [*given]:
            return [*sides], len(shared)
        return [[*given, *side] for side in sides], len(given)


def _length_shared(chosen: str, rejected: str) -> int:
    """Returns the length of the prompt that both texts begin with: whole words, without the space after them."""
    length = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
    return len(re.sub(r"\S*$", "", chosen[:length]).rstrip())


def chat_reader(source: ChatsSource, where: str, tokenizer: Tokenizer | None) -> ChatReader:
    """Returns the reader of a source. Raises ConfigError for a tokenizer that has no templates."""
    if not isinstance(tokenizer, HuggingFace):
        what = "chats need the tokenizer of a published model, with a chat template"
        fix = "choose data/tokenizer=huggingface data.tokenizer.path=FOLDER"
        raise ConfigError([Problem("data.tokenizer", what, fix)])
    reader = PreferenceReader if source.kind == "preferences" else ChatReader
    return reader(source, where, tokenizer)


def _find_template(name: str | None, tokenizer: HuggingFace, where: str) -> tuple[str, str]:
    """Returns a template and its place. Raises ConfigError if there is none of this name."""
    there = tokenizer.templates
    if name is None and "default" in there:
        return there["default"]
    if name in there:
        return there[name]
    key = f"{where}.template"
    if name is None:
        what = f"{tokenizer.folder} has no chat template"
        if there:
            raise ConfigError([Problem(key, f"{what} named default", use_one_of("default", there))])
        fix = f"name a file with one, as its model was trained with: {key}=FILE; or write prompt and completion"
        raise ConfigError([Problem(key, what, fix)])
    try:
        return text_of_file(expanded(name), key, "name a file with a template of Jinja"), name
    except (ConfigError, PlaceError) as error:
        what = f"'{name}' is not a template of {tokenizer.folder}, and no file that can be read"
        fix = use_one_of(name, there) if there else "name a file with a template of Jinja"
        raise ConfigError([Problem(key, what, fix)]) from error


def how_masked(kinds: Sequence[str]) -> str:
    """Returns how it was found what the model is to learn, in words."""
    words = {
        "generation": "by the template's {% generation %}",
        "prefix": "by what the template writes up to each answer, and to its end",
        "completion": "completions",
        TODAY: "with today's date, which data.source.date fixes",
    }
    return ", ".join(words[kind] for kind in kinds)
