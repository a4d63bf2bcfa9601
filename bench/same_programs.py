"""Compares the optimised programs of this checkout with those of another one, for a covering set of declarations.

    python bench/same_programs.py CHECKOUT                       # every declaration, two at a time
    python bench/same_programs.py CHECKOUT --only prefetch       # those with this in their name
    python bench/same_programs.py CHECKOUT --was "parallel.embedding=all_gather => parallel.embedding=all_gather"

A change of structure must not change what runs. Each declaration is compiled by the command itself, in both checkouts,
for eight simulated devices; XLA writes its optimised HLO, and the texts are compared without metadata (scopes, source
lines), which may be renamed. `--was "NEW => OLD"` gives an
override, or the beginning of one, as the other checkout spells it.
Exit code 1: some program differs.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
XLA_FLAGS = (
    "--xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_(init|train|eval|is_finite).* "
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)
COMMON = (
    "target=cpu-8", "model.num_layers=4", "model.embed_dim=16", "model.num_heads=4", "model.num_kv_heads=2",
    "model.head_dim=4", "model.mlp_dim=32", "model.vocab_size=256", "sequence_length=16", "global_batch_size=16",
    "compilation_cache=null",
)  # fmt: skip
TENSOR_MESH = ("sharding=fsdp_tensor", "mesh.fsdp=4", "mesh.tensor=2")
CUBE = ("sharding=fsdp_tensor", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
PREFETCH = ("overlap=prefetch",)
GPT2 = (
    "model.positions=learned", "model.rope_theta=null", "model.num_positions=16", "model.norm=layer", "model.mlp=plain",
    "model.biases=all", "model.embeddings=tied", "model.vocab_size=264",
)  # fmt: skip
EXPERTS = ("model=tiny_moe", "model.num_layers=4", "sequence_length=16", "global_batch_size=16")
ROWS: dict[str, tuple[str, ...]] = {
    "ddp": ("sharding=ddp",),
    "fsdp": ("sharding=fsdp",),
    "hsdp": ("sharding=hsdp", "mesh.replica=4", "mesh.fsdp=2"),
    "zero1, 2 microbatches": ("sharding=zero1", "num_microbatches=2"),
    "zero2, remat full": ("sharding=zero2", "remat=full"),
    "tensor": ("sharding=tensor", "mesh.data=1", "mesh.tensor=8", "model.num_heads=8", "model.num_kv_heads=8"),
    "fsdp and tensor": TENSOR_MESH,
    "data, fsdp and tensor, save_dots, 2 microbatches": (*CUBE, "remat=save_dots", "num_microbatches=2"),
    "fsdp, bfloat16": ("sharding=fsdp", "precision=bfloat16_params"),
    "fsdp, remat save_names": ("sharding=fsdp", "remat=save_names"),
    "fsdp, remat offload": ("sharding=fsdp", "remat=offload"),
    "prefetch, fsdp": ("sharding=fsdp", *PREFETCH),
    "prefetch 2, unroll 2, fsdp and tensor": (*TENSOR_MESH, *PREFETCH, "overlap.layers.prefetch=2",
                                              "overlap.layers.unroll=2"),
    "prefetch, hsdp, reduced in the backward pass": ("sharding=hsdp", *PREFETCH,
                                                     "overlap.layers.reduce_in_backward=true"),
    "collective matmul, fsdp and tensor": (*TENSOR_MESH, "parallel.matmul=collective_matmul"),
    "batch split, fsdp and tensor": (*TENSOR_MESH, "overlap.layers.batch_split=2"),
    "batch split, collective matmul, remat full": (*TENSOR_MESH, "overlap.layers.batch_split=2", "remat=full",
                                                   "parallel.matmul={attention_output:collective_matmul,mlp_output:plain}"),
    "embedding rows exchanged": ("sharding=fsdp", "parallel.embedding=all_to_all"),
    "embedding gathered": ("sharding=fsdp", "parallel.embedding=all_gather"),
    "vocabulary chunks": ("sharding=fsdp", "parallel.lm_head=vocab_chunks"),
    "chunked loss": ("sharding=fsdp", "loss.max_logits_bytes=16384", "loss.max_logits_share=0.0"),
    "gpt2's parts, fsdp and tensor": (*TENSOR_MESH, *GPT2),
    "packed documents, dropout": ("sharding=fsdp", "data.packing=first_fit", "model.dropout_rate=0.1"),
    "linear stack": ("model=linear_stack", "sharding=fsdp"),
    "muon": ("sharding=fsdp", "optimizer=muon"),
    "experts": (*EXPERTS, "sharding=fsdp_expert", "mesh.fsdp=4", "mesh.expert=2"),
    "experts, capacity": (*EXPERTS, "sharding=fsdp_expert", "mesh.fsdp=4", "mesh.expert=2",
                          "parallel.experts=capacity"),
    "context": ("sharding=fsdp_context", "mesh.fsdp=4", "mesh.context=2"),
}  # fmt: skip


def normalised(text: str) -> str:
    """Returns a program without what may be renamed: metadata, tables of source lines, numbers in names."""
    text = re.sub(r"\n(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*", "\n", text)
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    numbers: dict[str, int] = {}
    text = re.sub(r"%[\w.\-]+|\b[\w\-]+\.\d+(?=: )", lambda m: f"%{numbers.setdefault(m[0], len(numbers))}", text)
    return re.sub(r"\n+", "\n", text)


def programs_of(checkout: Path, overrides: Sequence[str]) -> dict[str, str]:
    """Compiles a declaration by a checkout's own command; returns its programs by name."""
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder, "dump")
        environment = os.environ | {
            "PYTHONPATH": str(checkout / ".pkg"),
            "XLA_FLAGS": f"--xla_dump_to={dump} {XLA_FLAGS}",
        }
        line = [sys.executable, "-m", "meshloom", "compile", *overrides, f"hydra.run.dir={folder}/run"]
        ended = subprocess.run(line, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        texts = sorted(dump.glob("*after_optimizations.txt")) if dump.exists() else []
        if not texts:
            raise SystemExit(f"{checkout} compiled nothing:\n{' '.join(line)}\n{ended.stdout}{ended.stderr}")
        return {path.name.split(".")[1]: normalised(path.read_text()) for path in texts}


def compare(name: str, other: Path, was: Sequence[str]) -> list[str]:
    """Returns what differs between both checkouts' programs, a line each."""
    has_own_sizes = any(x.startswith("model=") for x in ROWS[name])
    declared = [*(x for x in COMMON if not (has_own_sizes and x.startswith("model."))), *ROWS[name]]
    ours, theirs = programs_of(HERE, declared), programs_of(other, [_as_it_was(x, was) for x in declared])
    found = [f"{each}: only in one" for each in sorted(ours.keys() ^ theirs.keys())]
    for each in sorted(ours.keys() & theirs.keys()):
        if ours[each] != theirs[each]:
            pairs = zip(ours[each].splitlines(), theirs[each].splitlines(), strict=False)
            here, there = next((pair for pair in pairs if pair[0] != pair[1]), ("(longer)", ""))
            found.append(f"{each}:\n    here  {here[:160]}\n    there {there[:160]}")
    return found


def _as_it_was(override: str, was: Sequence[str]) -> str:
    """Returns an override as the other checkout spells it."""
    for pair in was:
        new, _, old = (part.strip() for part in pair.partition("=>"))
        if override.startswith(new):
            return old + override[len(new) :]
    return override


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--was", action="append", default=[])
    options = parser.parse_args()
    names = [name for name in ROWS if options.only in name]
    with ThreadPoolExecutor(2) as pool:
        other = options.checkout.resolve()
        found = dict(zip(names, pool.map(lambda name: compare(name, other, options.was), names), strict=True))
    for name, differences in found.items():
        print(f"{name:<50} {'same' if not differences else 'differs'}")
        for line in differences:
            print(f"  {line}")
    print(f"{sum(not each for each in found.values())} of {len(found)} declarations have the same programs")
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
