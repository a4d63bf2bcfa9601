"""Renders chats by the Jinja template of a tokenizer, and finds the characters that the model is to learn.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    -> <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                            ^^^^^^^^^^^^^^^

These are what a template marks by {% generation %}, as in the transformers library. A template without that tag is
rendered up to each answer and to its end, and the texts are compared. What follows the token that ends an answer is not
part of it.

A special token in a text that a user wrote is text. So before a template sees that text, the first character of each
special token in it is replaced by a character that stands in no text (`HiddenTokens`).
"""

import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MaskedBy = Literal["generation", "prefix", "completion"]
Messages = Sequence[Mapping[str, Any]]

# Unicode's noncharacters, for internal use: no text holds them. Private ones follow, where they do not suffice.
_NONCHARACTERS = [*range(0xFDD0, 0xFDF0), *(plane * 0x10000 + 0xFFFE + end for plane in range(17) for end in (0, 1))]
_BEGIN, _END, *_MARKS = [*map(chr, _NONCHARACTERS), *map(chr, range(0x10F000, 0x10FFF0))]
FIRST_ALIAS = 0x100000  # private characters that tokenizers.py puts in place of special tokens
MODEL = "assistant"  # the role of what the model says
SWITCHES = ("weight", "train", "training", "loss")  # of a message; false or 0: it is not to be learnt
NOT_WRITTEN = ("role", *SWITCHES)  # keys of a message that are not part of the text


class ChatError(Exception):
    """A chat cannot be rendered. fix: as in a Problem."""

    def __init__(self, what: str, fix: str):
        super().__init__(what)
        self.what, self.fix = what, fix


@dataclass(frozen=True)
class Chat:
    """A chat as text. trained: the spans of text to learn. masked_by: how they were found. Special tokens in the text
    are those of the template, unless masked_by is completion: a prompt and a completion are text alone. holds_today:
    whether the template wrote today's date."""

    text: str
    trained: tuple[tuple[int, int], ...]
    masked_by: MaskedBy
    holds_today: bool = False

    def __len__(self) -> int:
        return len(self.text)


class JsonObject(dict[str, Any]):
    """An object that a template may also write as it is: some templates expect the text of arguments, others an object.
    text: the object in JSON."""

    def __init__(self, value: Mapping[str, Any], text: str):
        super().__init__(value)
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: str) -> str:
        return self.text + other

    def __radd__(self, other: str) -> str:
        return other + self.text


class _Parts(list[Any]):
    """The parts of a content, which a template has to write one by one."""

    def __str__(self) -> str:
        what = "has content in parts, which the chat template would write as a list of Python"
        raise ChatError(what, "write the content as one text, or name a template that reads parts")


class _Watched(dict[str, Any]):
    """A message that notes which of its keys are read, by its role."""

    def __init__(self, message: Mapping[str, Any], read: set[tuple[str, str]]):
        super().__init__(message)
        self._read, self._role = read, message["role"]

    def __getitem__(self, key: str) -> Any:
        self._read.add((self._role, key))
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._read.add((self._role, str(key)))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add((self._role, key))
        return super().get(key, default)

    def items(self) -> Any:
        self._read |= {(self._role, key) for key in self.keys()}
        return super().items()

    def values(self) -> Any:
        return dict(self.items()).values()


class HiddenTokens:
    """Hides special tokens in texts of users from templates and tokenizers, and shows them again."""

    def __init__(self, special: Iterable[str]):
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self.tokens = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        firsts = sorted({token[0] for token in longest_first})
        self._marks = dict(zip(firsts, _MARKS, strict=False))
        self._shown = str.maketrans({mark: first for first, mark in self._marks.items()})
        self._prefixes = {token[:n] for token in longest_first for n in range(1, len(token))}
        self._longest = max(map(len, longest_first), default=0)
        aliases = [chr(FIRST_ALIAS + n) for n in range(len(longest_first))]
        self._refused = re.compile("[" + "".join([_BEGIN, _END, *self._marks.values(), *aliases]) + "]")

    def hide(self, value: Any) -> Any:
        """Returns a value of JSON in which no text holds a special token, or ends in the beginning of one."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, list):
            return [self.hide(each) for each in value]
        if isinstance(value, JsonObject):
            return JsonObject(self.hide(dict(value)), self._hide_text(value.text))
        if isinstance(value, dict):
            return {self.hide(key): self.hide(each) for key, each in value.items()}
        return value

    def show(self, text: str) -> str:
        """Returns a text with its hidden tokens."""
        return text.translate(self._shown)

    def is_hiding(self, text: str) -> bool:
        """Returns True if a text has hidden tokens."""
        return self.show(text) != text

    def unescaped(self, text: str) -> str:
        """Returns a text in JSON with its hidden tokens as they were, where it is ASCII alone."""
        for mark in self._shown if "\\u" in text else ():
            text = text.replace(json.dumps(chr(mark))[1:-1], chr(mark))
        return text

    def _hide_text(self, text: str) -> str:
        check_unicode(text)
        if refused := self._refused.search(text):
            what = f"holds U+{ord(refused[0]):04X}, which is not a character of any language"
            raise ChatError(what, "leave it out")
        text = self.tokens.sub(lambda found: self._marks[found[0][0]] + found[0][1:], text)
        end = len(text.rstrip())  # templates strip texts
        for place in range(max(0, end - self._longest), end):
            if text[place:end] in self._prefixes:
                text = text[:place] + self._marks[text[place]] + text[place + 1 :]
        return text


def check_unicode(text: str) -> None:
    """Raises ChatError for half of a surrogate pair, which JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"holds text that is not Unicode: {error.reason}"
        raise ChatError(what, "write it without lone surrogates") from error


class _Generation(Extension):
    """Marks what lies between {% generation %} and {% endgeneration %}."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 types it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return _BEGIN + caller() + _END


@dataclass
class ChatTemplate:
    """A template of Jinja, in a sandbox. place: its file, for messages. variables: what it gets beside a chat. date:
    what it may write; None: today."""

    source: str
    place: str
    hidden: HiddenTokens
    variables: Mapping[str, Any]
    date: datetime.date | None = None
    _wrote_today: bool = field(default=False, init=False)
    _given: dict[tuple[str, str], None] = field(default_factory=dict, init=False)  # roles and keys of messages
    _read: set[tuple[str, str]] = field(default_factory=set, init=False)  # of these, by the template

    def __post_init__(self) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = self._to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": self._write_date}
        try:
            self._template = environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            what = f"the chat template of {self.place} is not valid: line {error.lineno}: {error.message}"
            raise ChatError(what, "correct it, or name another one: data.source.template=FILE") from error
        self._variables = meta.find_undeclared_variables(environment.parse(self.source))
        self.has_tag = re.search(r"\{%[-+]?\s*generation\b", self.source) is not None

    @property
    def unread(self) -> tuple[str, ...]:
        """Returns the keys of the messages so far that the template has not read in any of them."""
        return tuple(f"'{key}' of {role}" for role, key in self._given if (role, key) not in self._read)

    def does_read(self, key: str) -> bool:
        """Returns True if the template uses what a line has under the key."""
        return key in self._variables

    def chat(
        self, messages: Messages, extra: Mapping[str, Any], *, num_given: int = 0, is_learnt: Sequence[bool] = ()
    ) -> Chat:
        """Returns a chat, rendered. num_given: the first messages, which are not to be learnt whoever wrote them.
        is_learnt: False for an answer that is not to be learnt; default: all are. Raises ChatError."""
        hidden = self._prepared(messages)
        more = self.hidden.hide(dict(extra))
        self._wrote_today = False
        text = self._render(hidden, more)
        answers = [n for n, message in enumerate(messages) if message["role"] == MODEL]
        is_left_out = {n for n in answers if is_learnt and not is_learnt[n]}
        if self.has_tag:
            text, spans = _marked_spans(text)
            if is_left_out and len(spans) != len(answers):
                what = f"marks {len(spans)} texts by {{% generation %}} for {len(answers)} answers"
                fix = "mark each answer once, or write chats in which all answers are to be learnt"
                raise ChatError(f"has an answer that is not to be learnt, and the chat template {what}", fix)
            if is_left_out:
                spans = [span for n, span in zip(answers, spans, strict=True) if n not in is_left_out]
            first = self._length_before(text, hidden, num_given, more) if num_given else 0
            spans = [(max(start, first), stop) for start, stop in spans if stop > first]
        else:
            learnt = [n for n in answers if n >= num_given and n not in is_left_out]
            spans = [self._span_of(text, hidden, n, more) for n in learnt]
        spans = [(start, stop) for start, stop in spans if start < stop]
        return Chat(text, tuple(spans), "generation" if self.has_tag else "prefix", self._wrote_today)

    def opening(self, messages: Messages, extra: Mapping[str, Any] | None = None) -> Chat:
        """Returns a chat up to where the model answers. Raises ChatError."""
        more = self.hidden.hide(dict(extra or {}))
        text = self._without_tags(self._prepared(messages), more, add_generation_prompt=True)
        return Chat(text, (), "prefix")

    def _prepared(self, messages: Messages) -> Messages:
        """Returns messages as the template sees them."""
        self._given |= {
            (message["role"], key): None
            for message in messages
            for key, value in message.items()
            if key not in NOT_WRITTEN and value not in (None, "", [], {})
        }
        hidden = self.hidden.hide([*messages])
        for message in hidden:
            if isinstance(message.get("content"), list):
                message["content"] = _Parts(message["content"])
        return [_Watched(message, self._read) for message in hidden]

    def _span_of(self, text: str, messages: Messages, number: int, extra: Mapping[str, Any]) -> tuple[int, int]:
        """Returns the span of a message, from texts without those after it."""
        start = self._length_before(text, messages, number, extra)
        until = self._body(messages[: number + 1], extra)
        if not text.startswith(until):
            raise _rewrites(number)
        ends = [found.end() for found in self.hidden.tokens.finditer(until, start)]
        is_ended = bool(ends) and not until[ends[-1] :].strip()
        return start, ends[-1] if is_ended else len(until)

    def _body(self, messages: Messages, extra: Mapping[str, Any]) -> str:
        """Returns the text of messages without what a template writes at the end of a chat, such as the end of a
        document: the text that is also written where an answer is asked for."""
        whole = self._without_tags(messages, extra)
        asking = self._without_tags(messages, extra, add_generation_prompt=True)
        if asking.startswith(whole):
            return whole
        pairs = enumerate(zip(whole, asking, strict=False))
        length = next((n for n, (one, other) in pairs if one != other), min(len(whole), len(asking)))
        halved = [found.start() for found in self.hidden.tokens.finditer(whole) if found.start() < length < found.end()]
        return whole[: halved[0] if halved else length]

    def _length_before(self, text: str, messages: Messages, number: int, extra: Mapping[str, Any]) -> int:
        """Returns the number of characters before a message, with those that ask the model for it."""
        before = self._without_tags(messages[:number], extra, add_generation_prompt=True)
        if not text.startswith(before):
            raise _rewrites(number)
        return len(before)

    def _without_tags(self, messages: Messages, extra: Mapping[str, Any], **variables: Any) -> str:
        return _marked_spans(self._render(messages, extra, **variables))[0]

    def _render(self, messages: Messages, extra: Mapping[str, Any], *, add_generation_prompt: bool = False) -> str:
        values = {"tools": None, "documents": None, **self.variables, **extra}
        try:
            return self._template.render(values, messages=messages, add_generation_prompt=add_generation_prompt)
        except _RefusedError as error:
            fix = "correct the chat, or name another template: data.source.template=FILE"
            raise ChatError(f"the chat template refuses it: {error}", fix) from error
        except ChatError:
            raise
        except Exception as error:  # whatever the template calls
            what = f"the chat template of {self.place} fails: {type(error).__name__}: {error}"
            raise ChatError(what, "correct the chat or the template") from error

    def _to_json(self, value: Any, **options: Any) -> str:
        text = json.dumps(value, **{"ensure_ascii": False, **options})
        return self.hidden.unescaped(text)

    def _write_date(self, pattern: str) -> str:
        self._wrote_today |= self.date is None
        now = datetime.datetime.now() if self.date is None else datetime.datetime.combine(self.date, datetime.time())
        return now.strftime(pattern)


def plain_chat(prompt: str, completion: str) -> Chat:
    """Returns a prompt and its completion, without a template."""
    return Chat(prompt + completion, ((len(prompt), len(prompt) + len(completion)),), "completion")


class _RefusedError(jinja2.TemplateError):
    """Raised by a template itself."""


def _raise_exception(message: Any) -> NoReturn:
    raise _RefusedError(str(message))


def _rewrites(number: int) -> ChatError:
    what = f"message {number}: the chat template changes earlier turns, so that texts before and after it do not agree"
    fix = "mark the answers in the template by {% generation %}, or write each answer's chat on a line of its own"
    return ChatError(what, fix)


def _marked_spans(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Returns a text without marks, and the spans that they enclose."""
    pieces = re.split(f"([{_BEGIN}{_END}])", text)
    spans, length, start = list[tuple[int, int]](), 0, 0
    for piece in pieces:
        if piece == _BEGIN:
            start = length
        elif piece == _END:
            spans.append((start, length))
        else:
            length += len(piece)
    return "".join(pieces[::2]), spans
