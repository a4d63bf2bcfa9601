"""Reports as the compiler makes them, put together by hand from round figures, with the events of their timelines."""

import json
from dataclasses import replace
from functools import cache, partial
from typing import Any

from meshloom.compiler.analysis.schedule_analysis import UNDECLARED, nothing_timed
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.figures import StepFigures, StepWork, no_figures
from meshloom.compiler.plan import Plan
from meshloom.compiler.schema import (
    Alternative,
    BuildReport,
    CollectiveReport,
    Event,
    Finding,
    MemoryChange,
    MemoryReport,
    ProgramReport,
    Report,
    RooflinePart,
    SearchReport,
    StepReport,
    TargetReport,
    TriedReport,
)
from meshloom.compiler.spec.overlap_spec import LayerLoop
from support.traffic import origin

NUM_LAYERS, NUM_CHIPS, GIB = 32, 256, 2**30
WEIGHTS = {  # elements of one layer of llama2_7b
    "attention/query_EHD": 4096 * 4096, "attention/key_EKD": 4096 * 4096, "attention/value_EKD": 4096 * 4096,
    "attention/out_HDE": 4096 * 4096, "mlp/gate_EM": 4096 * 11008, "mlp/up_EM": 4096 * 11008,
    "mlp/down_ME": 11008 * 4096, "attention_norm/scale_E": 4096, "mlp_norm/scale_E": 4096,
}  # fmt: skip
OUTSIDE = {"embed/table_VE": 32000 * 4096, "head/kernel_EV": 4096 * 32000, "head/norm/scale_E": 4096}
OVERRIDES = ("model=llama2_7b", "sharding=fsdp", "precision=bfloat16", "remat=full", "sequence_length=4096",
             "global_batch_size=512")  # fmt: skip


@cache
def llama_plan() -> Plan:
    """The plan that goes with the reports below."""
    overrides = (*OVERRIDES, f"target=cpu-{NUM_CHIPS}", "data=synthetic")
    return read_spec(Request(overrides), then=plan_run)


def in_page(report: Report) -> dict[str, Any]:
    """Returns what the page of a report holds: report.json, with sources as texts alone."""
    written = json.loads(report.model_dump_json())
    for each in written["collectives"]:
        del each["origin"]
    return written


@cache
def fits() -> tuple[Report, tuple[Event, ...]]:
    """llama2_7b, FSDP over v5e-256: gathers hide behind matmuls but for the first, reduce-scatters are synchronous."""
    collectives = (*_of_layers(bandwidth=180e9, exposed_kinds=("reduce-scatter",)), *_outside(180e9))
    events = _timeline(collectives, num_layers=NUM_LAYERS)
    return _report(collectives, {"matmul": 2.385, "attention": 0.312, "other": 0.148}), events


def does_not_fit() -> tuple[Report, tuple[Event, ...]]:
    """The same without remat."""
    report, events = fits()
    memory = report.memory.model_copy(
        update={
            "breakdown": report.memory.breakdown | {"activations": 38 * GIB + 123_456_789},
            "changes": (
                MemoryChange(overrides=("remat=save_dots",), saved_bytes=19 * GIB, fits=False,
                       slower_fraction=0.012, cost="the forward pass is computed in part"),
                MemoryChange(overrides=("remat=full",), saved_bytes=35 * GIB, fits=True, slower_fraction=0.31,
                       cost="the forward pass is computed twice"),
                MemoryChange(overrides=("num_microbatches=4", "remat=save_dots"), saved_bytes=34 * GIB, fits=True,
                       slower_fraction=Unknown("not estimated"), cost="weights are gathered four times as often"),
            ),
        }
    )  # fmt: skip
    overrides = (*report.overrides, "remat=none")
    report = report.model_copy(update={"memory": memory, "overrides": overrides})
    return with_figures(report, peak_bytes=41 * GIB, fits=False), events


def offloaded() -> tuple[Report, tuple[Event, ...]]:
    """`fits` with 20 GiB of activations in the host's memory."""
    report, events = fits()
    return with_figures(report, host_bytes=20 * GIB), events


def with_figures(report: Report, **changed: Any) -> Report:
    """Returns the report with other figures of the compiled step."""
    return report.model_copy(update={"compiled": report.compiled.model_copy(update=changed)})


def unknowns() -> tuple[Report, tuple[Event, ...]]:
    """Compiled for simulated devices: no chip, so no seconds and no limit."""
    report, _ = fits()
    no_chip = Unknown("simulated devices have no peak and no memory of their own")
    target = report.target.model_copy(
        update=dict.fromkeys(("hbm_bytes_per_chip", "hbm_bytes_per_second", "peak_flops_per_second"), no_chip)
        | {"name": "cpu-256", "chip": "cpu", "placement": {"fsdp": "256 simulated devices"}}
    )
    unlinked = Unknown("the bandwidth between simulated devices says nothing about a chip's")
    seconds = dict.fromkeys(("alone_seconds", "hidden_seconds", "exposed_seconds"), unlinked)
    collectives = tuple(
        replace(c, link="memory", is_async=False, form="synchronous", hidden_behind=(), confidence="low", **seconds)
        for c in report.collectives
    )  # fmt: skip
    step = nothing_timed("no clock, peak or bandwidth is known for simulated devices")
    assert isinstance(report.build, BuildReport)
    unrated = Unknown("no peak or bandwidth is known for simulated devices")
    bounds = dict.fromkeys(("flops_seconds", "hbm_seconds", "link_seconds"), unrated) | {"bound": None}
    no_limit = Unknown("the host's memory is shared by all devices")
    breakdown = report.memory.breakdown | {"reserved": Unknown("nothing is reserved on a host")}
    known = ("peak_bytes", "host_bytes", "host_limit_bytes", "host_fits")
    of_memory = {name: getattr(report.compiled, name) for name in known}
    step = step.model_copy(update=of_memory | {"limit_bytes": no_limit, "fits": no_limit, "num_unpriced": 812})
    return report.model_copy(
        update={
            "target": target, "collectives": collectives, "compiled": step,
            "memory": report.memory.model_copy(update={"breakdown": breakdown}),
            "roofline": tuple(part.model_copy(update=bounds) for part in report.roofline),
            "build": report.build.model_copy(update={"plugin": None, "compiler_options": {}}),
        }
    ), ()  # fmt: skip


@cache
def gpu() -> tuple[Report, tuple[Event, ...]]:
    """llama2_7b on 64 H100: tensor within a node over NVLink, fsdp across nodes over NICs."""
    target = TargetReport(
        name="h100-64", chip="h100", num_chips=64, num_devices=64, num_slices=8, hbm_bytes_per_chip=80 * 10**9,
        hbm_bytes_per_second=3.35e12, peak_flops_per_second=989e12,
        calibration="",
        placement={"fsdp": "NIC x 8 nodes", "tensor": "NVLink x 8 GPUs of a node"},
    )  # fmt: skip
    collectives = (*_of_layers(bandwidth=50e9, exposed_kinds=("all-gather",), group=8, link="NIC"),
                   *_outside(50e9, group_size=8, link="NIC"), *_of_activations())  # fmt: skip
    report = _report(collectives, {"matmul": 2.05, "attention": 0.26, "other": 0.19}, target)
    assert isinstance(report.build, BuildReport)
    build = report.build.model_copy(update={"plugin": "jax-cuda13-plugin 0.10.2", "compiler_options": {
        "xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_enable_pipelined_all_gather": True}})  # fmt: skip
    report = report.model_copy(update={"target": target, "build": build})
    return with_figures(report, peak_bytes=52 * GIB, limit_bytes=72 * GIB), _timeline(collectives, num_layers=8)


def _collective(kind: str, source: str, elements: int, bandwidth: float, count: int, **other: Any) -> CollectiveReport:
    alone = count * (2 * elements / bandwidth + 15e-6)
    fields: dict[str, Any] = {
        "kind": kind, "mesh_axes": ("fsdp",), "group_size": NUM_CHIPS, "link": "ICI", "bytes": 2 * elements * count,
        "dtype": "bf16", "count": count, "alone_seconds": alone, "hidden_seconds": alone, "exposed_seconds": 0.0,
        "hidden_behind": (), "is_async": True, "form": "collective fusion", "origin": origin(source), "line": "",
        "where": f"while body, {count} trips", "confidence": "high", "name": f"{kind}.{len(source) * 7}",
    }  # fmt: skip
    return CollectiveReport(**fields | other)


def _of_layers(
    *, bandwidth: float, exposed_kinds: tuple[str, ...], group: int = NUM_CHIPS, link: str = "ICI"
) -> list[CollectiveReport]:
    made = []
    common: dict[str, Any] = {"group_size": group, "link": link}
    for index, (path, elements) in enumerate(WEIGHTS.items()):
        for number, (kind, way) in enumerate(
            (("all-gather", "forward"), ("all-gather", "backward"), ("reduce-scatter", "backward"))
        ):
            source = f"layers/{path}, {way}"
            plain = _collective(kind, source, elements, bandwidth, NUM_LAYERS)
            alone = plain.alone_seconds or 0.0
            other = common | {"name": f"{kind}.{100 + 3 * index + number}"}
            if kind in exposed_kinds and index % 4 != 3:
                other |= {"is_async": False, "form": "synchronous", "hidden_seconds": 0.0, "exposed_seconds": alone}
            elif index == 0:
                other |= {"hidden_seconds": 0.0, "exposed_seconds": alone}
            elif index % 3 == 0:
                other |= {"hidden_seconds": 0.6 * alone, "exposed_seconds": 0.4 * alone,
                          "hidden_behind": (f"fusion.{index} (mlp/down_ME)", "splash attention")}  # fmt: skip
            else:
                other |= {"hidden_behind": (f"fusion.{index} (mlp/gate_EM)",)}
            made.append(_collective(kind, source, elements, bandwidth, NUM_LAYERS, **other))
    return made


def _outside(bandwidth: float, **common: Any) -> list[CollectiveReport]:
    made = []
    common = {"group_size": NUM_CHIPS, "where": "entry"} | common
    for path, elements in OUTSIDE.items():
        for kind, way in (("all-gather", "forward"), ("reduce-scatter", "backward")):
            made.append(_collective(kind, f"{path}, {way}", elements, bandwidth, 1, **common))
    norm = {"dtype": "f32", "hidden_seconds": 0.0, "exposed_seconds": 16e-6, "alone_seconds": 16e-6, "is_async": False,
            "form": "synchronous", "where": "entry", "confidence": "low"}  # fmt: skip
    made.append(_collective("all-reduce", "gradient norm", 1, bandwidth, 1, **common | norm))
    made.append(_collective("all-reduce", "jit(train_step)/loss/psum", 1, bandwidth, 1, **common | norm))
    return made


def _of_activations() -> list[CollectiveReport]:
    return [
        _collective("all-reduce", f"layers/{name}, {way}", 8192 * 4096, 450e9, NUM_LAYERS, mesh_axes=("tensor",),
                    group_size=8, link="NVLink", form="all-reduce-start", is_async=True, hidden_seconds=0.0,
                    exposed_seconds=NUM_LAYERS * (2 * 8192 * 4096 / 450e9 + 15e-6), name=f"all-reduce-start.{n}")
        for n, (name, way) in enumerate([("attention/out_HDE", "forward"), ("mlp/down_ME", "forward"),
                                         ("attention_norm/scale_E", "backward"), ("mlp_norm/scale_E", "backward")])
    ]  # fmt: skip


V5E = TargetReport(
    name="v5e-256", chip="v5e", num_chips=NUM_CHIPS, num_devices=NUM_CHIPS, num_slices=1, hbm_bytes_per_chip=16 * GIB,
    hbm_bytes_per_second=819e9, peak_flops_per_second=197e12,
    calibration="",
    placement={"fsdp": "ICI x (16, wraps) x ICI y (16, wraps)"},
)  # fmt: skip


def searched() -> SearchReport:
    """Three programs: declared, best, one that the compiler failed on."""
    plain = LayerLoop(unroll=1, batch_split=1, prefetch=0, deferred_reduce_scatter=False, reduce_in_backward=False)
    loops = [plain, plain.model_copy(update={"unroll": 2, "prefetch": 1, "deferred_reduce_scatter": True})]
    work = StepWork(512 * 4096, 91_200_000_000_000_000, NUM_CHIPS, 197e12 * NUM_CHIPS)
    known = {"peak_bytes": 9 * GIB, "host_bytes": 0, "fits": True}
    declared = step_figures(work, step_seconds=3.3, exposed_seconds=0.12 * 3.3, **known)
    best = step_figures(work, step_seconds=2.9, exposed_seconds=0.01 * 2.9, **known)
    return SearchReport(
        tried=(
            TriedReport(layers=loops[0], parallel={}, flag_presets=(), figures=declared, compile_seconds=40.0),
            TriedReport(layers=loops[1], parallel={}, flag_presets=("async_fusion",), figures=best,
                        compile_seconds=40.0),
            TriedReport(layers=loops[1], parallel={}, flag_presets=(), figures=no_figures("INTERNAL: <b>no</b>"),
                        compile_seconds=0.0),
        ),
        chosen=1, num_equal=1, num_ruled_out=3, num_untried=4, bound="max_candidates=3",
        overrides=("overlap.layers.prefetch=1",), cache="miss",
    )  # fmt: skip


def step_figures(work: StepWork = UNDECLARED, **given: Any) -> StepFigures:
    """Returns the figures of a step of which only this is known."""
    return no_figures("this test does not say").model_copy(update=given).rated(work)


def _report(collectives: tuple[CollectiveReport, ...], compute: dict[str, float], target: TargetReport = V5E) -> Report:
    peak, bandwidth = target.peak_flops_per_second or 0, target.hbm_bytes_per_second or 0
    exposed = sum(c.exposed_seconds or 0 for c in collectives)
    predicted = sum(compute.values()) + exposed
    breakdown = {
        "parameters": 105_287_744, "master": 0, "optimizer": 210_575_488, "gradients": 105_287_744,
        "activations": int(3.9 * GIB), "temporaries": int(2.6 * GIB), "code": 61_000_000, "reserved": int(0.25 * GIB),
    }  # fmt: skip
    model_flops = 91_200_000_000_000_000
    flops = model_flops // target.num_chips
    part = partial(_part, peak, bandwidth)
    work = StepWork(512 * 4096, model_flops, target.num_chips, peak * target.num_chips)
    link_seconds = sum(c.alone_seconds or 0 for c in collectives)
    return Report(
        schema_version=17,
        pipeline=None,
        target=target,
        program=ProgramReport(
            model="llama2_7b", num_parameters=6_738_415_616, num_active_parameters=6_738_415_616,
            tokens_per_step=512 * 4096, model_flops_per_step=model_flops,
        ),
        memory=MemoryReport(breakdown=dict(breakdown), changes=()),
        collectives=collectives,
        estimated=step_figures(work, step_seconds=1.1 * predicted, peak_bytes=int(7.4 * GIB), host_bytes=19 * GIB),
        compiled=StepReport(
            **dict(step_figures(
                work, compute_seconds=sum(compute.values()), exposed_seconds=exposed, bubble_seconds=0.0,
                step_seconds=predicted, range_factor=1.1, peak_bytes=sum(breakdown.values()),
                limit_bytes=int(15.75 * GIB), fits=True, host_bytes=0, host_limit_bytes=48 * 10**9, host_fits=True,
                range_basis="dense: 9 of 10 such steps are expected inside, by 29 published runs, 3 on v5e",
            )),
            compute_seconds_by_kind=compute,  # pyright: ignore[reportArgumentType]
            least_seconds=predicted, roofline_seconds=1.1 * flops / peak, bound_seconds=0.9 * flops / peak,
            num_unpriced=0, counted_once=(), num_bounded=3, bounded_seconds=0.02 * predicted,
        ),
        roofline=(
            part("layers (x32): matmuls", int(0.86 * flops), int(390e9), link_seconds * 0.9),
            part("attention", int(0.10 * flops), int(120e9), 0.0),
            part("head and loss", int(0.04 * flops), int(30e9), link_seconds * 0.05),
            part("embedding", 2_000_000, int(1.1e9), 2.9e-3),
            part("optimizer", 1_300_000_000, int(0.9e9), 0.0),
        ),
        findings=(
            Finding(rule="synchronous-collective", severity="warning",
                    what="every reduce-scatter of the layers is synchronous: 141 ms of a step",
                    where="while body (layers, backward); sharding.parameters[0]",
                    fix="try overlap=auto, or sharding=hsdp with mesh.fsdp=16"),
            Finding(rule="large-temporary", severity="note", what="logits are held in float32: 1.0 GiB",
                    where="head; loss.max_logits_bytes", fix="set loss.max_logits_bytes=268435456"),
        ),
        search=None,
        alternatives=tuple(
            Alternative(overrides=overrides, figures=step_figures(
                work, step_seconds=share * predicted, exposed_seconds=0.9 * exposed, peak_bytes=int(gib * GIB),
                fits=gib < 15,
            ))
            for overrides, share, gib in (
                ((), 1.1, 7.4), (("remat=save_dots",), 0.99, 11.2), (("remat=none",), 0.9, 31.0),
            )
        ),
        build=BuildReport(
            lower_seconds=3.2, compile_seconds=41.7, cache="miss", jax="0.10.2", jaxlib="0.10.2",
            plugin="libtpu 0.0.42.1",
            compiler_options={"xla_tpu_enable_async_collective_fusion": True,
                              "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1000000},
            compiler_options_left_out=(),
            fingerprint="6f1d0f0c7f7a2b53d9a0e7b8c5",
        ),
        overrides=(*OVERRIDES, f"target={target.name}"),
    )  # fmt: skip


def _part(peak: float, bandwidth: float, name: str, flops: int, hbm_bytes: int, link_seconds: float) -> RooflinePart:
    bounds = {"flops": flops / peak, "hbm": hbm_bytes / bandwidth, "link": link_seconds}
    return RooflinePart(
        name=name, flops=flops, hbm_bytes=hbm_bytes, link_bytes=int(link_seconds * 180e9),
        flops_seconds=bounds["flops"], hbm_seconds=bounds["hbm"], link_seconds=link_seconds,
        bound=max(bounds, key=lambda k: bounds[k]),  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


def _timeline(collectives: tuple[CollectiveReport, ...], *, num_layers: int) -> tuple[Event, ...]:
    """Layer by layer: its gathers run beside the matmuls of the one before; what is synchronous stops compute."""
    events: list[Event] = []
    now, loop, iteration = 0.0, "", 0

    def event(track: str, name: str, kind: str, start: float, seconds: float, **arguments: Any) -> None:
        events.append(Event(
            track=track, name=f"{kind} {name}", instruction=f"{name}.{len(events)}", kind=kind, start_seconds=start,
            seconds=seconds, loop=loop, iteration=iteration, arguments=arguments,
        ))  # fmt: skip

    def compute(name: str, kind: str, seconds: float) -> None:
        nonlocal now
        event("compute", name, kind, now, seconds, FLOPs=round(seconds * 197e12))
        now += seconds

    for way in ("forward", "backward"):
        loop = f"layers, {way}"
        for layer in range(num_layers):
            start, iteration = now, layer + 1
            mine = [c for c in collectives if c.source.endswith(way) and c.source.startswith("layers/")]
            links = {c.link for c in mine}
            at = dict.fromkeys(links, start)
            for c in mine:
                alone = (c.alone_seconds or 0) / c.count
                track = {"ICI": "ICI x", "NIC": "NIC", "NVLink": "NVLink"}[c.link]
                if c.is_async:
                    event(track, c.name, c.kind, at[c.link], alone, source=c.source, bytes=c.bytes // c.count)
                    at[c.link] += alone
            scale = 2 if way == "backward" else 1
            for name, kind, ms in (
                ("attention/query_EHD", "matmul", 3.1), ("attention/key_EKD", "matmul", 3.1),
                ("attention/value_EKD", "matmul", 3.1), ("splash attention", "attention", 3.3),
                ("attention/out_HDE", "matmul", 3.1), ("mlp_norm", "other", 0.8), ("mlp/gate_EM", "matmul", 6.2),
                ("mlp/up_EM", "matmul", 6.2), ("silu", "other", 0.8), ("mlp/down_ME", "matmul", 6.2),
            ):  # fmt: skip
                compute(name, kind, scale * ms / 1e3 / 1.6)
            for c in (c for c in mine if not c.is_async):
                alone = (c.alone_seconds or 0) / c.count
                track = {"ICI": "ICI x", "NIC": "NIC"}[c.link]
                for on, kind in ((track, c.kind), ("compute", "exposed")):
                    event(on, c.name, kind, now, alone, source=c.source)
                now += alone
    loop, iteration = "", 0
    compute("optimizer", "other", 4e-3)
    return tuple(events)


CASES = {"fits": fits, "does not fit": does_not_fit, "offloaded": offloaded, "unknowns": unknowns, "gpu": gpu}
