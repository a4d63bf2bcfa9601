"""Generates text with the weights of a run or a published model."""

from collections.abc import Sequence
from os import PathLike, fspath
from typing import overload

from meshloom.compiler.core.console import Console
from meshloom.compiler.declare.compose import read_spec
from meshloom.compiler.declare.sections import GENERATE, in_section

from ..inference.generate import Completion
from ..inference.generation_job import prepare_generation
from ..inference.run_request import request_of_run
from .library_call import library_call, settings_put_back, warn


@overload
def generate(  # pyright: ignore[reportOverlappingOverload] (a text is a sequence of texts, too)
    place: str | PathLike[str], prompt: str, *overrides: str
) -> Completion: ...
@overload
def generate(place: str | PathLike[str], prompt: Sequence[str], *overrides: str) -> list[Completion]: ...
def generate(place: str | PathLike[str], prompt: str | Sequence[str], *overrides: str) -> Completion | list[Completion]:
    """Continues a prompt, or several, with the weights of a run or of a folder of published weights.

    overrides: as typed after `meshloom generate`: "temperature=0", "max_new_tokens=20", "target=cpu-1". Raises
    ConfigError with all problems.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    with settings_put_back(), library_call():
        request = request_of_run(fspath(place), in_section(GENERATE, overrides))
        job = read_spec(request, then=lambda spec: prepare_generation(spec, prompts, warn))
        completions = [each for each in job.run(Console(is_quiet=True)) if isinstance(each, Completion)]
    completions.sort(key=lambda each: each.number)
    return completions[0] if isinstance(prompt, str) else completions
