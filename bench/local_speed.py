"""Compares a LoRA step and greedy text on this machine's processor with transformers and PEFT, in processor seconds.

    pip install -e '.[peers]' && python bench/local_speed.py [ROUNDS [step|text]]

The model has the shape of SmolLM2-135M, with random weights, as transformers saves it. In each round each row runs once
in a process of its own, and the rows take turns. PyTorch has one thread there: several would spin while they wait.
Printed are medians over rounds, with the smallest and the largest; each is a median of steps, after one that warms
up. Nothing compiled is kept.
"""

import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS = 3
LENGTH, BATCH, RANK = 128, 2, 16
NUM_STEPS, PROMPT, NUM_TOKENS = 3, "the model of a step", 12
ROWS = {  # who computes: the type of transformers, or overrides
    "transformers float32": "float32",
    "transformers bfloat16": "bfloat16",
    "meshloom": "",
    "meshloom precision=bfloat16": "precision=bfloat16",
    "meshloom target=cpu-8": "target=cpu-8 global_batch_size=8 sequence_length=32",  # as many tokens, for 8 devices
}
WORKS = {"step": "a LoRA step of 256 tokens", "text": "a token of a text"}


def seconds() -> float:
    """Returns the processor seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed(act: Callable[[], Any]) -> float:
    began = seconds()
    act()
    return seconds() - began


def make(folder: Path) -> None:
    """Writes the folder of a published model: random weights, and a tokenizer of bytes."""
    import torch  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5}, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)  # pyright: ignore
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>").save_pretrained(folder)


def theirs(folder: Path, work: str, dtype: str) -> list[float]:
    """Returns the seconds of each step, or of each token after the first ones."""
    import torch  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    if work == "text":
        tokens = torch.randint(3, 250, (1, len(PROMPT)))

        def text(many: int = NUM_TOKENS) -> None:
            model.generate(tokens, max_new_tokens=many, min_new_tokens=many, do_sample=False, pad_token_id=2)

        text()
        first, whole = timed(lambda: text(1)), timed(text)
        return [(whole - first) / (NUM_TOKENS - 1)] * NUM_STEPS
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear"))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer, tokens = torch.optim.AdamW(trained, lr=2e-4), torch.randint(0, 49152, (BATCH, LENGTH))

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    return [timed(step) for _ in range(NUM_STEPS)]


def ours(folder: Path, work: str, overrides: list[str]) -> tuple[float, list[float]]:
    """Returns the seconds of compiling, and of each step, or of each token after the first one."""
    return (_our_text if work == "text" else _our_steps)(folder, overrides)


def _our_text(folder: Path, overrides: list[str]) -> tuple[float, list[float]]:
    from meshloom.compiler.core.console import Console  # noqa: PLC0415
    from meshloom.compiler.declare.compose import read_spec  # noqa: PLC0415
    from meshloom.runtime.inference.generate import Generator  # noqa: PLC0415
    from meshloom.runtime.inference.generation_job import prepare_generation  # noqa: PLC0415
    from meshloom.runtime.inference.open_weights import open_weights  # noqa: PLC0415
    from meshloom.runtime.inference.run_request import request_of_run  # noqa: PLC0415

    words = [each for each in overrides if not each.startswith(("global_batch_size", "sequence_length"))]
    request = request_of_run(str(folder), ["compilation_cache=null", "generate.temperature=0", *words])
    job, console = prepare_generation(read_spec(request, then=lambda spec: spec), [PROMPT]), Console(is_quiet=True)
    params, settings = open_weights(job.session, console).params, job.session.plan.spec.generate
    generator = Generator(job.session, params, job.tokenizer, (), console)  # no token ends a text

    def text(many: int = NUM_TOKENS) -> None:
        list(generator.run(job.prompts, settings.model_copy(update={"max_new_tokens": many})))

    compiled = timed(text)
    first, whole = timed(lambda: text(1)), timed(text)
    return compiled - whole, [(whole - first) / (NUM_TOKENS - 1)] * NUM_STEPS


def _our_steps(folder: Path, overrides: list[str]) -> tuple[float, list[float]]:
    import jax  # noqa: PLC0415

    from meshloom.compiler.core.console import Console  # noqa: PLC0415
    from meshloom.compiler.declare.compose import Request, read_spec  # noqa: PLC0415
    from meshloom.compiler.xla.programs import build, lower  # noqa: PLC0415
    from meshloom.runtime.compile.run_programs import mesh_of  # noqa: PLC0415
    from meshloom.runtime.processes.distributed import Processes  # noqa: PLC0415
    from meshloom.runtime.start.state import fresh_state  # noqa: PLC0415
    from meshloom.runtime.train.train import prepare  # noqa: PLC0415

    sizes = (f"global_batch_size={BATCH}", f"sequence_length={LENGTH}", f"adapter.rank={RANK}")
    words = ("model=from_hf", f"model.path={folder}", "adapter=lora", "data=synthetic", *sizes, *overrides)
    job = prepare(read_spec(Request(words), then=lambda spec: spec))
    assert job.weights
    lowered, made = lower(job.plan, mesh_of(job.plan), drawn_paths=job.weights.fresh), list[Any]()
    compiled = timed(lambda: made.append(build(lowered)))
    (programs,) = made
    state = fresh_state(job.plan, job.weights, programs, Console(is_quiet=True), Processes()).state
    batch = next(iter(job.data["train"]))
    placed = {name: jax.device_put(batch[name], x.sharding) for name, x in programs.batch.items()}

    def step() -> None:
        nonlocal state
        state, metrics = programs["train"](state, placed)
        jax.block_until_ready((state, metrics))

    step()
    return compiled, [timed(step) for _ in range(NUM_STEPS)]


def measured(folder: Path, row: str, work: str) -> tuple[float | None, float]:
    """Returns the seconds of compiling, and the median of a step or a token, of a row in a process with one core."""
    alone = os.environ | {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "JAX_COMPILATION_CACHE_DIR": ""}
    line = [sys.executable, __file__, str(folder), row, work]
    done = subprocess.run(line, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled, each = re.findall(r"^seconds (\S+) (\S+)$", done.stdout, re.M)[-1]
    return None if compiled == "None" else float(compiled), float(each)


def main() -> None:
    if len(sys.argv) == 4:
        folder, row, work = sys.argv[1:]
        by_them = row.startswith("transformers")
        compiled, each = (
            (None, theirs(Path(folder), work, ROWS[row])) if by_them else ours(Path(folder), work, ROWS[row].split())
        )
        print("seconds", compiled, statistics.median(each))
        return
    rounds, works = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS, sys.argv[2:] or list(WORKS)
    with tempfile.TemporaryDirectory() as place:
        make(folder := Path(place) / "smollm2")
        found = dict[tuple[str, str], list[tuple[float | None, float]]]()
        for number in range(rounds):
            for row in list(ROWS)[:: -1 if number % 2 else 1]:
                for work in works:
                    found.setdefault((work, row), []).append(measured(folder, row, work))
                    print(f"# {work} {row} {found[work, row][-1]}", file=sys.stderr, flush=True)
    for work in works:
        base = statistics.median(each for _, each in found[work, next(iter(ROWS))])
        print(f"| {WORKS[work]} | seconds, median (range) | of transformers float32 | compiling |\n|---|---|---|---|")
        for row in ROWS:
            each, compiled = [x for _, x in found[work, row]], [x for x, _ in found[work, row] if x is not None]
            middle, once = statistics.median(each), f"{statistics.median(compiled):.1f}" if compiled else ""
            print(f"| {row} | {middle:.3f} ({min(each):.3f} to {max(each):.3f}) | {middle / base:.2f} | {once} |")
        print(flush=True)


if __name__ == "__main__":
    main()
