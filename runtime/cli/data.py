"""`meshloom data`: a corpus, tokenised into shards."""

import argparse

from meshloom.compiler.config.compose import Request, read_spec
from meshloom.compiler.core.console import Console

from .tokenize_corpus import prepare_corpus, tokenize_corpus


def data_command(request: Request, flags: argparse.Namespace) -> int:  # noqa: ARG001 (as all commands)
    """Writes the shards. Raises ConfigError for a corpus that cannot be read."""
    return tokenize_corpus(read_spec(request, then=prepare_corpus), Console())
