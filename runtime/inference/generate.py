"""Generates text with the weights of a run or a published model, in batches, by two compiled programs for each size.

    generator = Generator(session, params, tokenizer, ends, console)
    for event in generator.run(prompts, settings): ...        Piece, Piece, Completion, ...

The text of a batch comes while it is made: the program of the next token runs while the last one is decoded here.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import Problem
from meshloom.compiler.core.format import counted
from meshloom.compiler.declare.sections import GenerateSpec
from meshloom.compiler.step.decode import BatchShape, Sampling
from meshloom.compiler.xla.programs import Programs, lower_generation

from ..data.tokenizers import HuggingFace, Tokenizer
from .open_weights import Session, compile_programs

LEAST_PROMPT = 16  # the shortest padded prompt; longer ones are padded to the next power of two
SLOTS_MULTIPLE = 128  # the length of a cache is a multiple of it: the lanes of a TPU's vector registers
TOKENS_BEFORE = 8  # of a prompt, that are decoded with what follows it

# end: the token that ends a document came. stop: one of `generate.stop` came. length: `max_new_tokens` are made.
# positions: the model has no position for another token.
EndedBy = Literal["end", "stop", "length", "positions"]
NO_CHARACTER = "\ufffd"  # what bytes decode to that are no character, or not yet
MOST_PENDING = 3  # tokens at the end of a text that the next ones may complete: a character has 4 bytes at most


class TextStream:
    """Decodes the tokens that follow others. before: the last tokens of a prompt, as a token's text may depend on what
    it follows: SentencePiece drops the space of the first one."""

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int]):
        self._decode = decode
        self._tokens = list(before)
        self._first, self._shown = 0, len(self._tokens)  # tokens decoded again, for what they are followed by; shown

    def add(self, token: int) -> str:
        """Returns the text that this token completes."""
        self._tokens.append(token)
        if not self._decode(self._tokens[self._first :]).endswith(NO_CHARACTER):
            return self._show(len(self._tokens))
        if len(self._tokens) - self._shown <= MOST_PENDING:
            return ""
        return self._show(len(self._tokens) - MOST_PENDING)

    def end(self) -> str:
        """Returns the text of what is incomplete at the end."""
        return self._show(len(self._tokens))

    def _show(self, last: int) -> str:
        before = self._decode(self._tokens[self._first : self._shown])
        text = self._decode(self._tokens[self._first : last])[len(before) :]
        self._first, self._shown = self._shown, last
        return text


class Stops:
    """Ends a text before the first of some texts. What may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""
        self.is_over = False

    def add(self, text: str) -> str:
        """Returns what can be shown."""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.is_over = True
            shown, self._held = self._held[: min(places)], ""
            return shown
        num_held = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - num_held
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def end(self) -> str:
        """Returns what was held back, where no more text comes."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of a text begin the other one."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class Piece:
    """A piece of the text of a completion. number: that of its prompt."""

    number: int
    text: str


@dataclass(frozen=True)
class Completion:
    """The model's completion of one prompt. text: without the prompt. tokens: of the text, without an end token."""

    number: int
    prompt: str
    text: str
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    ended_by: EndedBy


@dataclass(frozen=True)
class Prompt:
    """A prompt as text and as tokens. is_chat: a template wrote it."""

    text: str
    tokens: tuple[int, ...]
    is_chat: bool = False


@dataclass
class _Row:
    """A completion in the making. most: the tokens that it may have."""

    number: int
    prompt: Prompt
    most: int
    stream: TextStream
    stops: Stops
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    ended_by: EndedBy | None = None

    def show(self, text: str) -> Iterator[Piece]:
        if shown := self.stops.add(text):
            self.text.append(shown)
            yield Piece(self.number, shown)

    def end(self, ended_by: EndedBy) -> Iterator[Piece | Completion]:
        if ended_by != "stop":
            yield from self.show(self.stream.end())
            if self.stops.is_over:
                ended_by = "stop"
            elif rest := self.stops.end():
                self.text.append(rest)
                yield Piece(self.number, rest)
        self.ended_by = ended_by
        tokens, prompt = tuple(self.tokens), self.prompt
        yield Completion(self.number, prompt.text, "".join(self.text), tokens, len(prompt.tokens), ended_by)


class Generator:
    """A model on its devices. Programs are compiled when a batch of their size first comes, and kept."""

    def __init__(self, session: Session, params: Any, tokenizer: Tokenizer, ends: Collection[int], console: Console):
        self.session, self.plan, self.mesh, self.tokenizer = session, session.plan, session.mesh, tokenizer
        self._ends, self._console = frozenset(ends), console
        self._special = frozenset(tokenizer.special.values() if isinstance(tokenizer, HuggingFace) else ())
        self._stored, self._params = params, None
        self._programs: dict[BatchShape, Programs] = {}

    def run(self, prompts: Sequence[Prompt], settings: GenerateSpec) -> Iterator[Piece | Completion]:
        """Yields the text of each prompt in pieces, those of a batch by turns, and each completion when it ends."""
        size = min(settings.batch_size, len(prompts))
        for first in range(0, len(prompts), size):
            numbered = enumerate(prompts[first : first + size], first)
            rows = [self._row(number, prompt, settings) for number, prompt in numbered]
            for step in self._tokens(rows, size, settings):
                for row, token in zip(rows, step, strict=False):
                    if row.ended_by is None:
                        yield from self._take(row, int(token), settings)
                if all(row.ended_by for row in rows):
                    break

    def shape_of(self, prompts: Sequence[Prompt], size: int, settings: GenerateSpec) -> BatchShape:
        """Returns the sizes of the programs that run these prompts."""
        longest = max(len(prompt.tokens) for prompt in prompts)
        length = max(LEAST_PROMPT, 1 << (longest - 1).bit_length())
        num_slots = length + settings.max_new_tokens
        return BatchShape(size, length, -(-num_slots // SLOTS_MULTIPLE) * SLOTS_MULTIPLE)

    def _row(self, number: int, prompt: Prompt, settings: GenerateSpec) -> _Row:
        most, longest = settings.max_new_tokens, self.plan.model.max_length
        if longest is not None:
            most = min(most, longest - len(prompt.tokens))
        stream = TextStream(self._decode, prompt.tokens[-TOKENS_BEFORE:])
        return _Row(number, prompt, most, stream, Stops(settings.stop))

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode([token for token in tokens if token not in self._special])

    def _take(self, row: _Row, token: int, settings: GenerateSpec) -> Iterator[Piece | Completion]:
        if token in self._ends:
            yield from row.end("end")
            return
        row.tokens.append(token)
        yield from row.show(row.stream.add(token))
        if row.stops.is_over:
            yield from row.end("stop")
        elif len(row.tokens) == row.most:
            yield from row.end("length" if row.most == settings.max_new_tokens else "positions")

    def _tokens(self, rows: list[_Row], size: int, settings: GenerateSpec) -> Iterator[np.ndarray]:
        """Yields the next token of each sequence, until all have as many as they may."""
        prompts = [row.prompt for row in rows]
        shape = self.shape_of(prompts, size, settings)
        programs, params = self._compiled(shape)
        tokens, padding = _padded(prompts, shape)
        numbers = np.arange(rows[0].number, rows[0].number + size, dtype=np.int32)
        num_tokens = min(self.tokenizer.identity.vocab_size, self.plan.spec.model.vocab_size)
        chosen = settings.model_dump(include={"seed", "temperature", "top_k", "top_p"})
        values = (tokens, padding, Sampling.of(**chosen, num_tokens=num_tokens), numbers)
        tokens, padding, sampling, numbers = jax.device_put(values, programs["prefill"].input_shardings[0][1:])
        newest, cache = programs["prefill"](params, tokens, padding, sampling, numbers)
        everywhere, most = jax.NamedSharding(self.mesh, jax.P()), max(row.most for row in rows)
        for count in range(1, most + 1):
            made = newest
            if self.session.processes.count > 1:
                made.block_until_ready()  # with several in flight on CPU, processes were seen to hang
            if count < most:
                place = (np.int32(shape.prompt_length + count - 1), np.int32(count))
                slot, number = jax.device_put(place, everywhere)
                newest, cache = programs["decode"](params, cache, made, slot, padding, sampling, numbers, number)
            yield np.asarray(made.addressable_data(0))

    def _compiled(self, shape: BatchShape) -> tuple[Programs, Any]:
        """Returns the programs of a size, and the parameters as they take them."""
        if shape not in self._programs:
            names = ("prefill", "decode") if self._stored is None else ("working", "prefill", "decode")
            lower = partial(lower_generation, self.plan, self.mesh, shape, names)
            self._programs[shape] = compile_programs(self.session, lower, "compiling generation", self._console)
        if self._stored is not None:
            types = {x.dtype for x in jax.tree.leaves(self._stored)}
            is_used_so = types == {jnp.dtype(self.plan.spec.precision.compute)}
            self._params = self._stored if is_used_so else self._programs[shape]["working"](self._stored)
            self._stored = None
        return self._programs[shape], self._params


def problems_of_prompt(prompt: Prompt, longest: int | None, vocab_size: int, where: str) -> Iterator[Problem]:
    """Yields what is wrong with a prompt for a model. longest: its positions; None: any number."""
    num_tokens = len(prompt.tokens)
    if longest is not None and num_tokens >= longest:
        what = f"has {counted(num_tokens, 'token')}, and the model has {longest} positions for a prompt and its text"
        yield Problem(where, what, f"use {longest - 1} tokens or less")
    if prompt.tokens and max(prompt.tokens) >= vocab_size:
        what = f"has the token {max(prompt.tokens)}, and the model knows {vocab_size}"
        fix = "name the tokenizer of the model: data/tokenizer=huggingface data.tokenizer.path=..."
        yield Problem(where, what, fix)


def _padded(prompts: Sequence[Prompt], shape: BatchShape) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompts padded at the left, and how much padding each has. Missing prompts are the first one again."""
    tokens = np.zeros((shape.num_sequences, shape.prompt_length), np.int32)
    padding = np.zeros(shape.num_sequences, np.int32)
    for row in range(shape.num_sequences):
        own = prompts[row if row < len(prompts) else 0].tokens
        padding[row] = shape.prompt_length - len(own)
        tokens[row, padding[row] :] = own
    return tokens, padding
