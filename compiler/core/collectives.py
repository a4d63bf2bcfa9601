"""Kinds of compute, collectives and links: one vocabulary for the plan, the program and the report."""

from typing import Literal

ComputeKind = Literal["matmul", "attention", "other"]
CollectiveKind = Literal[
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "collective-broadcast", "send",
]  # fmt: skip
MOVING = ("all-gather", "all-to-all")  # kinds without a reduction: each device's operand is a part of the full array
COMPUTE = "compute"  # the track of a timeline on which compute runs; the others are links
LinkKind = Literal["ICI", "DCN", "NVLink", "NIC", "memory"]  # memory: simulated devices of one host
