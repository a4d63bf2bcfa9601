"""Generates text with the weights of a run or a published model."""

import os
from collections.abc import Sequence
from os import PathLike, fspath

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.declare.compose import read_spec
from meshloom.compiler.declare.generate_spec import in_section
from meshloom.compiler.declare.run_spec import RunSpec

from ..inference.generate import Completion
from ..inference.generation_job import GenerationJob, prepare_generation
from ..inference.run_request import request_of_run
from ..processes.devices import start_devices
from ..processes.distributed import Processes
from ..processes.initialize import plan_start
from .guest import as_guest, settings_put_back, warn


def generate(place: str | PathLike[str], prompt: str | Sequence[str], *overrides: str) -> Completion | list[Completion]:
    """Continues a prompt, or several, with the weights of a run or of a folder of published weights.

    overrides: as typed after `meshloom generate`: "temperature=0", "max_new_tokens=20", "target=cpu-1". Raises
    ConfigError with all problems.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)

    def prepare(spec: RunSpec) -> GenerationJob:
        if plan_start(spec.distributed, spec.target, os.environ) is not None:
            what = "there are several processes, and each would generate by itself here"
            fix = "start the command in all of them: `srun meshloom generate`, or choose distributed=alone"
            raise ConfigError([Problem("distributed", what, fix)])
        start_devices(spec.target, Processes(), warn)
        return prepare_generation(spec, prompts)

    with settings_put_back(), as_guest():
        job = read_spec(request_of_run(fspath(place), in_section(overrides)), then=prepare)
        generator = job.open(Processes(), Console(is_quiet=True))
        events = list(generator.run(job.prompts, job.plan.spec.generate))
    completions = sorted((each for each in events if isinstance(each, Completion)), key=lambda each: each.number)
    return completions[0] if isinstance(prompt, str) else completions
