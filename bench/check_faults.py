"""Deliberate faults in the code, each of which has to make a line of `meshloom check` fail: proof that they can.

    python bench/check_faults.py [--only TEXT]

The faults are some of bench/faults.toml, by name, each with a declaration whose program has the changed code. All
lines of a declaration first have to pass without a fault. A fault is made in this process: the code of the changed
functions is replaced, and the programs that it may change are lowered, compiled and run again. What was found is kept
in bench/check_faults.jsonl. Exits with 1 where a fault is not found, and nothing says why none could be.
"""

import argparse
import importlib
import inspect
import json
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import jax
from compiled_rows import markdown

from meshloom.compiler.check.check_report import CheckLine, judged_line
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.runtime.check.check import DeclarationCheck
from meshloom.runtime.check.programs import Compiler, SmallPlan
from meshloom.runtime.processes.devices import start_devices
from meshloom.runtime.processes.distributed import Processes

ROOT = Path(__file__).resolve().parents[1]
KEPT = Path(__file__).with_suffix(".jsonl")
PACKED = ("data.packing=first_fit", "data.isolate_documents=true")
DECLARED = {
    "dense": ("target=cpu-4", "sharding=fsdp_tensor", "mesh.tensor=2", "overlap=prefetch", "num_microbatches=2",
              "model.embeddings=tied", "model.attention_windows=[16,null]", "parallel.matmul=collective_matmul",
              *PACKED),
    "replicas": ("target=cpu-4", "sharding=hsdp", "mesh.replica=2", "mesh.fsdp=2", "overlap=prefetch",
                 "overlap.layers.prefetch=2", "overlap.layers.reduce_in_backward=true", "num_microbatches=2"),
    "context": ("target=cpu-4", "sharding=fsdp_context", "mesh.fsdp=2", "mesh.context=2", "parallel.context=ring",
                "data.isolate_documents=true"),
    "lengths": ("target=cpu-2", "sharding=fsdp_context", "mesh.fsdp=1", "mesh.context=2",
                "parallel.context=all_gather"),
    "experts": ("target=cpu-4", "model=tiny_moe", "sharding=fsdp_expert", "mesh.fsdp=2", "mesh.expert=2",
                "num_microbatches=2", "overlap=prefetch", *PACKED),
    "padded": ("target=cpu-2", "model=tiny_moe", "sharding=fsdp_expert", "mesh.fsdp=1", "mesh.expert=2",
               "parallel.experts=padded"),
    "stages": ("target=cpu-4", "mesh.fsdp=2", "mesh.stage=2", "num_microbatches=4", "model.embeddings=tied"),
    "chunks": ("target=cpu-4", "model=tiny_moe", "mesh.fsdp=2", "mesh.stage=2", "pipeline=interleaved_1f1b",
               "pipeline.head=stages", "num_microbatches=4"),
    "pairs": ("target=cpu-2", "sharding=fsdp", "objective=dpo", "data=preferences", "data.source.paths=[pairs.jsonl]",
              "data/tokenizer=bytes"),
    "adapter": ("target=cpu-2", "sharding=fsdp", "adapter=lora"),
    "few bits": ("target=cpu-2", "sharding=fsdp", "precision=fp8", "precision.emulate=true",
                 "precision.matmuls=[{match: null, forward: fp8, gradients: fp8_e5m2, gather: fp8}]"),
    "experts in few bits": ("target=cpu-4", "model=tiny_moe", "sharding=fsdp_expert", "mesh.fsdp=2", "mesh.expert=2",
                            "precision=fp8", "precision.emulate=true"),
}  # fmt: skip
STEP = ("loss", "gradients", "update", "auxiliary", "counts", "tied")
# The fault, by its name in faults.toml; the declaration; what is made again: the step, the matmuls in few bits, the
# data, the files or all.
FAULTS = (
    ("gradients of replicated weights are not summed over the devices", "replicas", "step"),
    ("the gradient of a sharded weight is summed again over the axes that split it", "dense", "step"),
    ("of a ring of partial sums, the last step is left out", "dense", "step"),
    ("the backward pass gathers the layer below, whatever the distance", "replicas", "step"),
    ("gradients that are reduced late are added to the totals of the layer below", "dense", "step"),
    ("the gradient of the lowest layer, reduced late, is never reduced", "dense", "step"),
    ("the loss of one device is taken for that of all", "dense", "step"),
    ("only the first microbatch is computed", "dense", "step"),
    ("the loss of the microbatches before the last one is dropped", "replicas", "step"),
    ("gradients of earlier microbatches are dropped where the last one is reduced", "replicas", "step"),
    ("ignored targets count in the mean", "dense", "step"),
    ("a microbatch has neighbours of each device", "experts", "step"),
    ("the update is clipped instead of the gradient", "dense", "step"),
    ("a cut document lacks its last target", "dense", "data"),
    ("positions go on from one document to the next", "dense", "data"),
    ("masks of chats are one token late", "dense", "data"),
    ("every exported layer is the first of its block", "replicas", "files"),
    ("every layer of a published folder goes into the first", "replicas", "files"),
    ("the host leaves tokens in the order of the sequence", "context", "step"),
    ("zig-zag order gives the second chunks in the wrong direction", "context", "step"),
    ("what a ring step gives is merged by the larger of both sums", "context", "step"),
    ("gradients of a ring do not come home", "context", "step"),
    ("documents are not told apart in a ring", "context", "step"),
    ("each device along a split length counts positions from the first token of its own", "lengths", "step"),
    ("gathered keys lie as the devices have them", "lengths", "step"),
    ("gradients of experts are summed over devices that have others", "experts", "step"),
    ("a row is taken back from the wrong place", "experts", "step"),
    ("each device balances its own tokens alone", "experts", "step"),
    ("means count padding", "experts", "step"),
    ("a device's auxiliary outputs are reported as those of all", "experts", "step"),
    ("the auxiliary losses of layers are averaged over them in the objective", "experts", "step"),
    ("results of a pipeline go to the stage below", "stages", "step"),
    ("a tied table has no gradient of the head's stage", "stages", "step"),
    ("auxiliary losses of a loop that prefetches have no gradient", "experts", "step"),
    ("targets share their memory with inputs", "context", "data"),
    ("each device takes the tokens of the first device's experts", "experts", "step"),
    ("rows of a padded exchange go back in the order of the experts", "padded", "step"),
    ("all chunks of a stage run the layers of the first", "chunks", "step"),
    ("gradients of chunks are sent on instead of back", "chunks", "step"),
    ("auxiliary losses of a pipeline's layers have no gradient", "chunks", "step"),
    ("the loss of a head that stages share is counted on each", "chunks", "step"),
    ("the sign of DPO's loss is turned", "pairs", "step"),
    ("the rejected answer is taken for the chosen one", "pairs", "step"),
    ("an adapter's change is not scaled when it is merged", "adapter", "files"),
    ("an adapter is merged from the last layer's matrices into all", "adapter", "files"),
    ("documents of a sequence see each other", "dense", "all"),
    ("a tied table gets the gradient of one of its uses", "dense", "step"),
    ("a tensor's scale is that of each device's own tokens", "few bits", "matmuls"),
    ("a device decodes with twice the scale of the others", "few bits", "matmuls"),
    ("a weight that is gathered in few bits has the scales of each shard", "few bits", "matmuls"),
    ("scales of experts are those of each device's own rows and part of a matrix", "experts in few bits", "matmuls"),
)

NOT_FOUND = {  # why no line can find it
    "a row is taken back from the wrong place": "the exchange by ragged all-to-all, which processors do not have: the "
    "check runs another one, and its line `program` says so",
    "gradients of chunks are sent on instead of back": "the small program has two stages, so the next stage and the "
    "one before are the same",
}  # fmt: skip


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Returns the table of what was found, for docs/results."""
    found = {row["fault"]: row for row in rows}
    ordered = [found[name] for name, *_ in FAULTS if name in found]
    cells = [
        (row["fault"], row["declared"], ", ".join(row["found_by"]) or f"not found: {NOT_FOUND.get(row['fault'], '')}")
        for row in ordered
    ]
    number = sum(bool(row["found_by"]) for row in ordered)
    columns = ("fault", "declaration", "lines that fail")
    untried = [name for name, *_ in FAULTS if name not in found]
    said = f"{number} of {len(ordered)} are found."
    if untried:
        said += f" {len(untried)} more were not tried yet: {'; '.join(untried)}."
    return f"{markdown(columns, cells)}\n\n{said}"


def main() -> int:
    """Makes the faults. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT")
    only = parser.parse_args().only
    table = {each["name"]: each for each in tomllib.loads((ROOT / "bench" / "faults.toml").read_text())["fault"]}
    chosen = [fault for fault in FAULTS if only in " ".join(fault)]
    found = _kept()
    for declared in dict.fromkeys(name for _, name, _ in chosen):
        with _clean(DECLARED[declared]) as check:
            for name, its, again in chosen:
                if its != declared:
                    continue
                start = time.perf_counter()
                with _made(table[name]["file"], table[name]["old"], table[name]["new"]):
                    failed = [line for line in _lines(check, again) if line.status == "failed"]
                row = {"fault": name, "declared": declared, "found_by": [line.name for line in failed],
                       "worst": max((line.measured or 0 for line in failed), default=0),
                       "seconds": round(time.perf_counter() - start, 1)}  # fmt: skip
                found = {**_kept(), name: row}
                print(f"{'found' if failed else 'NOT FOUND':9} {name}: {', '.join(row['found_by'])}", flush=True)
                KEPT.write_text("".join(json.dumps(row) + "\n" for row in found.values()))
    return int(any(not found[name]["found_by"] and name not in NOT_FOUND for name, *_ in chosen))


def _kept() -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    return {row["fault"]: row for row in rows}


@contextmanager
def _clean(overrides: tuple[str, ...]) -> Iterator[DeclarationCheck]:
    """Gives a check of a declaration whose lines all pass."""
    plan = read_spec(Request(overrides), then=plan_run)
    check = DeclarationCheck(plan, " ".join(overrides))
    with Compiler() as compiler:
        check.start(compiler)
        check.compile_all()
        wrong = [line for line in check.lines() if line.status == "failed"]
        if wrong:
            raise SystemExit(f"{overrides}: {wrong} without a fault")
        print(f"passes    {' '.join(overrides)}", flush=True)
        yield check


def _lines(check: DeclarationCheck, again: str) -> list[CheckLine]:
    """Returns the lines of what a fault may change."""
    before = vars(check).copy()
    try:
        if again == "files":
            return list(check.in_files())
        if again == "matmuls":
            vars(check).pop("in_few_bits")
            return [check.matmuls()]
        if again == "data":
            check.batches = check.data.batches()
            return [check.targets(), check.packed()]
        if again == "all":  # what the step and its reference share
            anew = DeclarationCheck(check.declared, check.program)
            anew.start(check.compiler)
            anew.compile_all()
            return list(anew.lines())
        check.plan = plan_run(check.spec)
        check.train = check.compiler.train(SmallPlan(check.plan), check.batches[0])
        vars(check).pop("steps")
        return [line for line in check.of_step() if line.name in STEP]
    except Exception as error:  # a fault that ends the program is found, too
        print(f"          {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return [judged_line("ends", "the step runs", [f"{type(error).__name__}: {error}"])]
    finally:
        vars(check).clear()
        vars(check).update(before)


@contextmanager
def _made(file: str, old: str, new: str) -> Iterator[None]:
    """Within the `with`, functions of a file have the code that they have with a fault."""
    text = (ROOT / file).read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times {old}"
    module = importlib.import_module("meshloom." + file.removesuffix(".py").replace("/", "."))
    codes = dict(_codes(compile(text.replace(old, new), file, "exec")))
    before = dict(_codes(compile(text, file, "exec")))
    changed = {name for name, code in codes.items() if name not in before or code.co_code != before[name].co_code
               or code.co_consts != before[name].co_consts or code.co_names != before[name].co_names}  # fmt: skip
    functions = {function for function in _functions(module) if function.__qualname__ in changed}
    assert functions, f"{file}: no function has the fault"
    kept = {function: function.__code__ for function in functions}
    try:
        for function in functions:
            function.__code__ = codes[function.__qualname__]
        jax.clear_caches()
        yield
    finally:
        for function, code in kept.items():
            function.__code__ = code
        jax.clear_caches()


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each.co_qualname, each
            yield from _codes(each)


def _functions(module: Any) -> Iterator[FunctionType]:
    """Yields the functions and methods of a module, below what wraps them."""
    for value in vars(module).values():
        for each in (value, *(vars(value).values() if inspect.isclass(value) else ())):
            inner: Any = each.fget if isinstance(each, property) else getattr(each, "fun", getattr(each, "func", each))
            inner = inspect.unwrap(inner.__func__ if isinstance(inner, staticmethod | classmethod) else inner)
            if isinstance(inner, FunctionType) and inner.__module__ == module.__name__:
                yield inner


if __name__ == "__main__":
    start_devices(read_spec(Request(("target=cpu-4",)), then=lambda spec: spec.target), Processes())
    sys.exit(main())
