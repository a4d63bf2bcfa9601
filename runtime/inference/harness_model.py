"""The model that lm-evaluation-harness sees. It imports the harness, which is an extra (harness.py)."""

import json
from typing import Any

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports] (an extra)
from lm_eval.utils import (  # pyright: ignore[reportMissingImports] (an extra)
    get_rolling_token_windows,
    make_disjoint_window,
)

from meshloom.compiler.core.console import Console

from ..data.tokenizers import Tokenizer
from .harness import Query, Scorer, complete


class HarnessModel(TemplateLM):
    """Opened weights with their tokenizer."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, console: Console):
        super().__init__()
        self._scorer, self._tokenizer, self._console = scorer, tokenizer, console

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.identity.end_of_document

    @property
    def max_length(self) -> int:
        """Returns the most tokens of a row."""
        return self._scorer.session.plan.spec.sequence_length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Returns the tokens of a text, without special ones."""
        del add_special_tokens
        (tokens,) = self._tokenizer.encode_texts([string.encode(errors="replace")])
        return list(map(int, tokens))

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        rows = [Query((*context, *continuation), len(continuation)) for _, context, continuation in requests]
        return self._scorer.score(rows, self._console)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text, from its first token on, in windows of `max_length` tokens."""
        del disable_tqdm
        rows, owners = list[Query](), list[int]()
        for number, request in enumerate(requests):
            (text,) = request.args
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            for context, continuation in map(make_disjoint_window, windows):
                rows.append(Query((*context, *continuation), len(continuation)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, (log_prob, _) in zip(owners, self._scorer.score(rows, self._console), strict=True):
            sums[number] += log_prob
        return sums

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Returns the continuation of each context, by `meshloom generate`'s programs."""
        del disable_tqdm
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts = [""] * len(requests)
        for wanted, numbers in groups.items():
            prompts = [requests[number].args[0] for number in numbers]
            for number, text in zip(
                numbers, complete(self._scorer, self._tokenizer, prompts, json.loads(wanted)), strict=True
            ):
                texts[number] = text
        return texts
