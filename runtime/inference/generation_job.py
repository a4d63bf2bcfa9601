"""Checks what is to be generated before any weight is read: plan, tokenizer, prompts, the place of the weights."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem, all_of, raise_if_any
from meshloom.compiler.core.visible import write_error
from meshloom.compiler.declare.data_spec import HuggingFaceTokenizer, OneSource, SentencePieceTokenizer
from meshloom.compiler.declare.generate_spec import SECTION
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.plan import Plan
from meshloom.compiler.step.decode import check_generates

from ..data.shards import read_index
from ..data.tokenizers import Bytes, HuggingFace, SentencePiece, Tokenizer, open_tokenizer
from .generate import Completion, Generator, Piece, Prompt, problems_of_prompt
from .open_weights import Session, open_weights, place_of_weights, start_session


@dataclass(frozen=True)
class GenerationJob:
    """What is to be generated, after all checks of its declaration."""

    session: Session
    tokenizer: Tokenizer
    prompts: tuple[Prompt, ...]

    def run(self, console: Console) -> Iterator[Piece | Completion]:
        """Opens the weights, and yields the text of each prompt while it is made. Raises ConfigError for weights of
        another model, RunFailed if the programs need more memory than there is."""
        params = open_weights(self.session, console).params
        ends = [self.tokenizer.identity.end_of_document]
        generator = Generator(self.session, params, self.tokenizer, ends, console)
        return generator.run(self.prompts, self.session.plan.spec.generate)


def prepare_generation(
    spec: RunSpec, texts: Sequence[str] | None = None, warn: Callable[[str], None] = write_error
) -> GenerationJob:
    """Returns the job of a declaration. Raises ConfigError with all problems.

    texts: the prompts; None: those that the declaration names. warn: takes a warning about attached devices.
    """
    plan, tokenizer, given, *_ = all_of(
        lambda: _generating_plan(spec),
        lambda: tokenizer_of(spec),
        lambda: declared_prompts(spec) if texts is None else list(texts),
        lambda: place_of_weights(spec),
    )
    _check_vocabulary(plan, tokenizer)
    prompts = tuple(make_prompt(text, tokenizer) for text in given)
    wheres = _wheres(spec, len(prompts)) if len(prompts) > 1 else [f"{SECTION}.prompt"]
    raise_if_any(
        problem
        for where, prompt in zip(wheres, prompts, strict=True)
        for problem in problems_of_prompt(prompt, plan, where)
    )
    return GenerationJob(start_session(spec, warn), tokenizer, prompts)


def _generating_plan(spec: RunSpec) -> Plan[RunSpec]:
    plan = plan_run(spec)
    check_generates(plan)
    return plan


def make_prompt(text: str, tokenizer: Tokenizer) -> Prompt:
    """Returns a prompt with its tokens. An empty one begins a document: it is the end of the one before."""
    (tokens,) = tokenizer.encode_texts([text.encode(errors="replace")])
    return Prompt(text, tuple(map(int, tokens)) or (tokenizer.identity.end_of_document,))


def declared_prompts(spec: RunSpec) -> list[str]:
    """Returns the prompts that the declaration names. Raises ConfigError where there is none, or for a file that cannot
    be read."""
    settings = spec.generate
    if settings.prompt is not None and settings.prompts is not None:
        raise ConfigError([Problem(f"{SECTION}.prompts", f"there is a {SECTION}.prompt, too", "give one of them")])
    if settings.prompt is not None:
        return [settings.prompt]
    if settings.prompts is None:
        fix = 'give one: prompt="Once upon a time", or a file of prompts: prompts=FILE'
        raise ConfigError([Problem(f"{SECTION}.prompt", "there is no prompt", fix)])
    return _read_prompts(Path(settings.prompts))


def _read_prompts(path: Path) -> list[str]:
    where = f"{SECTION}.prompts"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError([Problem(where, f"cannot read {path}: {error.strerror}", "name a file")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(where, f"{path} is not UTF-8", "name a text file")]) from error
    if not lines:
        raise ConfigError([Problem(where, f"{path} is empty", "write a prompt on each line")])
    if path.suffix != ".jsonl":
        return lines
    texts, problems = list[str](), list[Problem]()
    for number, line in enumerate(lines, start=1):
        try:
            text = json.loads(line)["prompt"]
            assert isinstance(text, str)
            texts.append(text)
        except (ValueError, KeyError, TypeError, AssertionError):
            what = f"line {number} of {path} is not a JSON object with a text as `prompt`"
            problems.append(Problem(where, what, 'write {"prompt": "..."} on each line'))
    raise_if_any(problems)
    return texts


def tokenizer_of(spec: RunSpec) -> Tokenizer:
    """Returns the tokenizer of a declaration: the one that it names, or that of its token shards. Raises ConfigError
    where there is none."""
    if spec.data.tokenizer is not None:
        return open_tokenizer(spec.data.tokenizer)
    source = spec.data.source
    sources: list[OneSource] = [each.source for each in source.parts.values()] if source.kind == "mixture" else [source]
    shards = next((each for each in sources if each.kind == "tokens"), None)
    if shards is None:
        fix = "name the one of the model: data/tokenizer=bytes, or data/tokenizer=huggingface data.tokenizer.path=FILE"
        what = f"there is none: the data of the run are of kind {source.kind}"
        raise ConfigError([Problem("data.tokenizer", what, fix)])
    return _stored_tokenizer(Path(shards.directory))


def _stored_tokenizer(folder: Path) -> Tokenizer:
    """Returns the tokenizer that shards were written with, from its file beside them."""
    where = "data.source.directory"
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


def _check_vocabulary(plan: Plan[RunSpec], tokenizer: Tokenizer) -> None:
    """Raises ConfigError where the tokenizer has tokens that the model does not know."""
    known, there = plan.spec.model.vocab_size, tokenizer.identity.vocab_size
    if there > known:
        what = f"it has {there:,} tokens, and the model has {known:,}"
        raise ConfigError([Problem("data.tokenizer", what, "name the tokenizer that the model was trained with")])


def _wheres(spec: RunSpec, count: int) -> list[str]:
    if spec.generate.prompts is None:
        return [f"prompt {number}" for number in range(1, count + 1)]
    return [f"{spec.generate.prompts}, line {number}" for number in range(1, count + 1)]
