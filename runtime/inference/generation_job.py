"""Checks what is to be generated before any weight is read: plan, tokenizer, prompts, the place of the weights."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem, all_of, raise_if_any
from meshloom.compiler.core.visible import write_error
from meshloom.compiler.declare.data_spec import DataSpec, HuggingFaceTokenizer, OneSource, SentencePieceTokenizer
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.plan import Plan
from meshloom.compiler.step.decode import check_generates

from ..data.shards import read_index
from ..data.tokenizers import Bytes, HuggingFace, SentencePiece, Tokenizer, open_tokenizer
from .generate import Completion, Generator, Piece, Prompt, problems_of_prompt
from .open_weights import Session, open_weights, place_of_weights, start_session
from .prompts import DeclaredPrompt, PromptMaker, declared_prompts


@dataclass(frozen=True)
class GenerationJob:
    """What is to be generated, after all checks of its declaration. ends: the tokens that end a completion."""

    session: Session
    tokenizer: Tokenizer
    prompts: tuple[Prompt, ...]
    ends: frozenset[int]

    def run(self, console: Console) -> Iterator[Piece | Completion]:
        """Opens the weights, and yields the text of each prompt while it is made. Raises ConfigError for weights of
        another model, RunFailed if the programs need more memory than there is."""
        params = open_weights(self.session, console).params
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
