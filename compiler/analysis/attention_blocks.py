"""Finds attention kernels of TPUs whose blocks do not suit their length, by what a block costs on the chip.

Of n x n blocks a causal mask leaves n (n + 1) / 2. So blocks as long as the sequence compute all scores, twice what is
needed, and short ones pay for each block what it costs besides its matmuls (conf/calibration/_kernels.yaml). A kernel
whose mask is not named counts as causal, as in its price.
The names of a kernel say how large its blocks are, or else the shape of its table of blocks:

    splash_mha_dkv_segmented_block_kv_dkv_512_block_q_dkv_512      512 x 512
    s8[1,4,4], of 2,048 queries and keys                           512 x 512

Kernels without either are left out, and so are ours, whose blocks the plan has chosen by the same costs.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..core.format import counted, human_names, human_seconds, human_share
from ..core.kernels import AttentionCall
from ..schema import Finding
from ..spec.kernel_rates import AttentionKernel, BlockRate
from ..target.target import TargetPlan
from ..xla.hlo import Computation, Instruction, Module
from ..xla.schedule.kernels import attention_work, is_attention, is_pallas, kernel_name
from ..xla.schedule.prices import price_instruction
from .program_text import LEAST_SHARE, NUM_PLACES, shown, source_finder
from .schedule_analysis import ScheduleAnalysis, chip_of

LEAST_SAVED = 0.05  # of a kernel's time
SIZES = (256, 512, 1024)  # that fit in the vector memory of each chip

_OURS = re.compile(r"\bblocks=\d+_of_\d+")  # the scope of a kernel of ours
_SIZE = r"[_=](\d+)"


@dataclass(frozen=True)
class BlockedKernel:
    """A call of a kernel by blocks. queries_block, keys_block: the tokens of a block. num_heads: of all sequences."""

    instruction: Instruction
    call: AttentionCall
    num_queries: int
    queries_block: int
    keys_block: int
    num_heads: int

    def num_visited(self, queries_block: int, keys_block: int) -> int:
        """Returns the blocks that a causal mask leaves, of one head."""
        first = self.call.length - self.num_queries  # the keys before the first query
        return sum(
            math.ceil(min(first + end, self.call.length) / keys_block)
            for end in range(queries_block, self.num_queries + 1, queries_block)
        )

    def flops(self, rate: BlockRate, queries_block: int, keys_block: int) -> float:
        """Returns the FLOPs at the peak for which the kernel takes as long with such blocks."""
        of_block = rate.matmul_flops(self.call.matmuls, self.call.head_dim) * queries_block * keys_block
        visited = self.num_visited(queries_block, keys_block)
        return self.num_heads * visited * (rate.lost_flops + of_block)


def find_unsuited_blocks(module: Module, schedule: ScheduleAnalysis, target: TargetPlan) -> Iterator[Finding]:
    """Yields a finding for each size of blocks, the most costly first."""
    chip = chip_of(target)
    if chip.attention is None or target.platform != "tpu" or not schedule.step.least_seconds:
        return
    found: dict[tuple[int, int, int, int], list[tuple[float, Instruction]]] = {}
    for around in module.computations.values():
        for each in around.instructions:
            kernel = _blocked(each, around) if each.name in schedule.compute_seconds else None
            price = price_instruction(each, around, module, chip) if kernel else None
            if kernel is None or price is None or not price.seconds:
                continue
            executions = schedule.compute_seconds[each.name] / price.seconds
            if better := _better(kernel, chip.attention):
                size, saved = better
                peak = next(iter(chip.peak_flops_per_second.values()))
                seconds = executions * saved / chip.peak_flops_per_second.get("bfloat16", peak)
                key = (kernel.call.length, kernel.queries_block, kernel.keys_block, size)
                found.setdefault(key, []).append((seconds, each))
    for key, kernels in sorted(found.items(), key=lambda one: -sum(cost for cost, _ in one[1])):
        share = sum(cost for cost, _ in kernels) / schedule.step.least_seconds
        if share >= LEAST_SHARE:
            yield _finding(module, key, kernels, share)


def _finding(
    module: Module, key: tuple[int, int, int, int], kernels: list[tuple[float, Instruction]], share: float
) -> Finding:
    length, queries_block, keys_block, size = key
    lines, seconds = source_finder(module), sum(cost for cost, _ in kernels)
    kernels.sort(key=lambda one: (-one[0], one[1].name))
    named = (shown(at, each.op_name) if (at := lines(each)) else each.name for _, each in kernels)
    places = human_names(list(dict.fromkeys(named)), NUM_PLACES, between="; ")
    is_large = size**2 < queries_block * keys_block
    why = "too large: scores that a causal mask hides are computed" if is_large else "too small: each costs extra"
    return Finding(
        rule="attention-block",
        severity="warning",
        what=f"{counted(len(kernels), 'attention kernel')} of {length:,} tokens in blocks of {queries_block:,} x "
        f"{keys_block:,}, {why}. Blocks of {size:,} would save {human_seconds(seconds)} a step, {human_share(share)}",
        where=f"{places} ({kernels[0][1].name})",
        fix=f"set the blocks of queries and keys to {size} (splash: BlockSizes; MaxText: sa_block_q={size}, "
        f"sa_block_kv={size}, and the same for the backward pass)",
    )


def _better(kernel: BlockedKernel, attention: AttentionKernel) -> tuple[int, float] | None:
    """Returns the best size of blocks, and the FLOPs at the peak that it saves; None if the kernel's is about as good,
    or the blocks of the chip's kernel have no cost."""
    rate = attention.backward if kernel.call.is_backward else attention.forward
    if not isinstance(rate, BlockRate):
        return None
    sizes = [n for n in SIZES if kernel.num_queries % n == 0 and kernel.call.length % n == 0]
    now = kernel.flops(rate, kernel.queries_block, kernel.keys_block)
    best = min(sizes, key=lambda n: kernel.flops(rate, n, n), default=None)
    if best is None or (saved := now - kernel.flops(rate, best, best)) < LEAST_SAVED * now:
        return None
    return best, saved


def _blocked(instruction: Instruction, around: Computation) -> BlockedKernel | None:
    """Returns the kernel by blocks that an instruction calls; None if it calls none, or its blocks are not known."""
    if not (instruction.opcode == "custom-call" and is_pallas(instruction) and is_attention(instruction)):
        return None
    operands = tuple(array for name in instruction.operands for array in around.by_name[name].arrays)
    work = attention_work(instruction, operands)
    queries = next(
        (each.shape for each in operands if len(each.shape) > 2 and each.dtype.startswith(("bf", "f"))), None
    )
    if _OURS.search(instruction.op_name) or queries is None or work is None or work.attention is None:
        return None
    num_queries, length = queries[-2], work.attention.length
    name, found = f"{kernel_name(instruction)} {instruction.op_name}", list[int]()
    of_pass = next((f"_{each}" for each in ("dkv", "dq") if f"_{each}" in kernel_name(instruction)), "")
    for side in ("q", "kv"):
        if match := re.search(rf"block_{side}{of_pass}{_SIZE}", name):
            found.append(int(match[1]))
    if len(found) < 2:
        table = next(
            (each.shape for each in operands if each.dtype in ("s8", "s16", "s32") and len(each.shape) == 3), None
        )
        if table is None:
            return None
        found = [-(-num_queries // table[-2]), -(-length // table[-1])]
    if min(found) < 1 or found[0] > num_queries or found[1] > length:
        return None
    return BlockedKernel(instruction, work.attention, num_queries, found[0], found[1], math.prod(queries[:-2]))
