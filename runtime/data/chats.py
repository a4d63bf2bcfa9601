"""Reads chats from JSON lines: `messages`, or `prompt` and `completion`, each with what a template may want besides."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from itertools import takewhile
from typing import Any, ClassVar

from meshloom.compiler.core.errors import ConfigError, Problem, use_one_of
from meshloom.compiler.core.places import PlaceError, expanded
from meshloom.compiler.declare.data_spec import ChatsSource

from ..core.inputs import SourceFile, records, text_of_file
from .chat_template import Chat, ChatError, ChatTemplate, Messages, check_unicode, plain_chat
from .tokenizers import HuggingFace, Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
KEYS = ("messages", "prompt", "completion", "chosen", "rejected")
TEMPLATE_ARGUMENTS = "chat_template_kwargs"  # of a line, as the trl library reads them
TODAY = "today"  # beside the ways to find what is trained on
SIDES = ("chosen", "rejected")
WRITE_PAIRS = "write one JSON object per line, with chosen and rejected, and a prompt or chats that begin alike"
WRITE = "write one JSON object per line, with messages, or with prompt and completion"


@dataclass
class ChatReader:
    """Reads the chats of a source. where: its key."""

    source: ChatsSource
    where: str
    tokenizer: HuggingFace
    chats_per_line: ClassVar[int] = 1

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

    def _chats(self, line: Mapping[str, Any]) -> Sequence[Chat]:
        """Returns the chats of a line. Raises ChatError."""
        if "messages" in line:
            return [self.template.chat(check_messages(line["messages"], "messages"), self._extra(line))]
        missing = [key for key in ("prompt", "completion") if key not in line]
        if missing:
            has = f"has no key 'messages', and no '{missing[0]}'"
            raise ChatError(has, f"{WRITE}; it has {', '.join(map(str, line)) or 'no keys'}")
        return [self._answered(line, "completion")]

    def _extra(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a line gives the template besides its messages."""
        extra = {key: value for key, value in line.items() if key not in (*KEYS, TEMPLATE_ARGUMENTS)}
        arguments = line.get(TEMPLATE_ARGUMENTS) or {}
        if not isinstance(arguments, dict):
            what = f"'{TEMPLATE_ARGUMENTS}' is {type(arguments).__name__}, not an object"
            raise ChatError(what, "write {key: value}")
        extra |= arguments
        own = (*self.tokenizer.token_variables, "messages", "add_generation_prompt")
        if refused := [key for key in extra if key in own]:
            raise ChatError(f"sets '{refused[0]}', which the tokenizer sets", "leave it out, or name it otherwise")
        return extra

    def _answered(self, line: Mapping[str, Any], key: str) -> Chat:
        """Returns a prompt with the answer under `key`."""
        prompt, answer = line["prompt"], line[key]
        if isinstance(prompt, str) and isinstance(answer, str):
            check_unicode(prompt + answer)
            return plain_chat(prompt, answer)
        given = check_messages(prompt, "prompt")
        return self.template.chat([*given, *check_messages(answer, key)], self._extra(line), num_given=len(given))


class PreferenceReader(ChatReader):
    """Reads pairs of chats: a chosen and a rejected answer to one prompt, one after the other."""

    chats_per_line: ClassVar[int] = 2

    def _chats(self, line: Mapping[str, Any]) -> Sequence[Chat]:
        if missing := [key for key in SIDES if key not in line]:
            there = ", ".join(map(str, line)) or "no keys"
            raise ChatError(f"has no key '{missing[0]}'", f"{WRITE_PAIRS}; it has {there}")
        if "prompt" in line:
            pair = [self._answered(line, key) for key in SIDES]
        else:  # the answers follow the messages that the two share
            chats = [check_messages(line[key], key) for key in SIDES]
            shared = list(takewhile(lambda both: both[0] == both[1], zip(*chats, strict=False)))
            if len(shared) in map(len, chats):
                raise ChatError("has a chosen chat that is the rejected one, or begins it", WRITE_PAIRS)
            pair = [self.template.chat(chat, self._extra(line), num_given=len(shared)) for chat in chats]
        # A pair is learnt from as one: without something to learn in both, neither is kept.
        return pair if all(chat.trained for chat in pair) else [replace(chat, trained=()) for chat in pair]


def chat_reader(source: ChatsSource, where: str, tokenizer: Tokenizer | None) -> ChatReader:
    """Returns the reader of a source. Raises ConfigError for a tokenizer that has no templates."""
    if not isinstance(tokenizer, HuggingFace):
        what = "chats need the tokenizer of a published model, with a chat template"
        fix = "choose data/tokenizer=huggingface data.tokenizer.path=FOLDER"
        raise ConfigError([Problem("data.tokenizer", what, fix)])
    reader = PreferenceReader if source.kind == "preferences" else ChatReader
    return reader(source, where, tokenizer)


def check_messages(value: Any, key: str) -> Messages:
    """Returns messages that have roles. Raises ChatError."""
    if not isinstance(value, list):
        raise ChatError(f"'{key}' is {type(value).__name__}, not a list of messages", WRITE)
    if not value:
        raise ChatError(f"'{key}' has no messages", "write the messages of a chat, or leave the line out")
    for number, message in enumerate(value):
        name = f"message {number} of '{key}'"
        if not isinstance(message, dict):
            raise ChatError(f"{name} is {type(message).__name__}, not an object", "write {role: ..., content: ...}")
        role = message.get("role")
        if role not in ROLES:
            what = f"{name} has the role '{role}'" if "role" in message else f"{name} has no 'role'"
            raise ChatError(what, use_one_of(role, ROLES))
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise ChatError(f"{name} has content that is {type(content).__name__}", "write text, or a list of parts")
        if content is None and set(message) <= {"role", "content"}:
            raise ChatError(f"{name} has no 'content'", "write its text under 'content'")
    return value


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
