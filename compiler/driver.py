"""The straight line, a pass per line. A decision belongs inside its pass.

    plan = plan_run(spec)                 PlanSpec -> Plan             what can be decided without a compiler
    step = compile_plan(plan, devices)    Plan -> CompiledStep        estimated, lowered, compiled, and its text read
    report = report_of(step)              CompiledStep -> Report      judged, for people and tools

A program that somebody else compiled has no plan, and comes in at the end of the line (analysis/compiled_step.py,
report/build_report.py):

    program = inspect_text(text, devices)    text -> InspectedProgram      read, and its findings
    report = report_inspected(program)       InspectedProgram -> Report    what a declaration says is unknown

Finding what was compiled before and watching a compiler at work are the caller's, who passes in how to compile a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from meshloom.models import Model

from .analysis.compiled_step import CompiledStep, find_findings, read_text
from .analysis.price_pgle import pgle_maker
from .core.errors import all_of
from .core.trees import like
from .estimate.estimate import estimate_declared
from .parallel.choose import plan_operations
from .parallel.delayed import abstract_magnitudes, delayed_sites
from .parallel.operation import OpInputs, OpPlan, ParallelOp, per_token_operation
from .parallel.pipeline_plan import PipelinePlan, layers_stay, plan_gather, plan_pipeline, read_tables
from .parallel.registry import OPERATIONS
from .parallel.remat import check_remat
from .parallel.shared_head import share_head
from .parallel.weight_plan import plan_weights
from .plan import Plan, plan_memory, plan_state_arrays
from .report.build_report import build_report
from .schema import Alternative, MemoryChange, Report, SearchReport
from .sharding.arrays import Arrays, build_model, find_arrays
from .sharding.batch import check_batch, check_length, check_token_order, plan_batch
from .sharding.model_check import check_length_split
from .sharding.roles import AxisRoles, plan_roles
from .sharding.sharding import ShardingPlan, check_gradients, check_rules, most_shards, plan_sharding
from .sharding.state import (
    build_optimizer,
    check_moments_on_host,
    check_schedule,
    paths_on_host,
    plan_state,
    update_layouts,
)
from .spec.calibration_spec import AUTO_CHIP, UNCALIBRATED
from .spec.plan_spec import AnyPlanSpec, PlanSpec
from .target.compiler_options import (
    Options,
    check_unroll,
    options_by_traits,
    plan_preset_options,
    with_options,
    with_presets,
)
from .target.mesh import MeshPlan, plan_mesh
from .target.target import TargetPlan, calibrate_target, plan_target
from .xla.aot import Built, LoweredStep, compile_ahead, lower_ahead
from .xla.pgle import check_pgle_key


def plan_run(spec: AnyPlanSpec, ops: Sequence[ParallelOp] = OPERATIONS) -> Plan[AnyPlanSpec]:
    """Decides everything that can be decided without a compiler. Raises ConfigError with all that cannot run. ops: the
    operations that run by a strategy of the plan; the registry's, and yours."""
    model = build_model(spec)
    target = calibrate_target(plan_target(spec.target, spec.precision.compute), spec.calibration)
    calibration = spec.calibration if spec.calibration.chip != AUTO_CHIP else target.calibration or UNCALIBRATED
    target = with_options(target, spec.overlap.flag_presets, spec.compiler_options)
    arrays = find_arrays(spec, model)
    layout = plan_layout(spec, model, target, arrays, ops)
    mesh, sharding, operations = layout.mesh, layout.sharding, layout.operations
    optimizer = build_optimizer(spec, model, update_layouts(model, sharding), mesh)
    magnitudes = abstract_magnitudes(delayed_sites(operations, model.stacks))
    abstract, specs = plan_state(spec, model, optimizer, sharding, mesh, magnitudes)
    on_host = paths_on_host(spec, model, sharding, abstract)
    memory = plan_memory(spec, mesh, layout.inputs.batch, sharding, abstract, specs, on_host)
    gather = plan_gather(layout.pipeline, layout.inputs, memory.state_bytes)
    return Plan(
        spec=spec.settled(overlap=layout.inputs.spec.overlap, calibration=calibration),
        target=target,
        mesh=mesh,
        batch=layout.inputs.batch,
        model=model,
        arrays=arrays,
        optimizer=optimizer,
        sharding=sharding,
        optimizer_state=plan_state_arrays(abstract, specs, sharding.optimizer, mesh),
        abstract=abstract,
        specs=specs,
        on_host=on_host,
        ops=tuple(ops),
        operations=operations,
        pipeline=layout.pipeline,
        gather=gather,
        weights=like(model.abstract(), plan_weights(layout.inputs, operations, gather)),
        memory=memory,
        preset_options=layout.preset_options,
    )


@dataclass(frozen=True)
class Layout:
    """Where the arrays of a run lie, and how its operations run over the mesh. inputs: what that was decided from."""

    inputs: OpInputs
    operations: tuple[OpPlan, ...]
    pipeline: PipelinePlan | None
    preset_options: Options

    @property
    def mesh(self) -> MeshPlan:
        return self.inputs.mesh

    @property
    def sharding(self) -> ShardingPlan:
        return self.inputs.sharding

    @property
    def parameter_bytes(self) -> int:
        """Returns the bytes of parameters on a device."""
        return sum(plan.bytes_per_device for plan in self.sharding.parameters)


def plan_layout(
    spec: PlanSpec, model: Model, target: TargetPlan, arrays: Arrays, ops: Sequence[ParallelOp] = OPERATIONS
) -> Layout:
    """Decides the layout, in milliseconds: a search calls it for each mesh. Raises ConfigError with all that cannot
    run."""
    spec = with_presets(spec, target, has_experts=arrays.has_experts)
    mesh, *_ = all_of(
        lambda: plan_mesh(spec.mesh, target, spec.device_order),
        lambda: check_rules(spec.sharding, arrays),
        lambda: check_schedule(spec),
        lambda: check_remat(spec.remat, arrays),
        lambda: check_pgle_key(spec, target),
    )
    roles = plan_roles(spec.sharding, mesh.sizes)
    tables_of = cache(lambda: read_tables(spec, mesh, model))  # the layout asks, too
    sharding, tables, preset_options, *_ = all_of(
        lambda: _plan_sharding(spec, arrays, mesh, roles, target, layers_stay=layers_stay(spec, model, tables_of)),
        tables_of,
        lambda: plan_preset_options(spec.overlap.flag_presets, target),
        lambda: check_batch(spec, mesh, roles),
        lambda: check_length(spec, model),
        lambda: check_length_split(spec, model, roles, per_token_operation(ops)),
    )
    inputs = OpInputs(spec, model, arrays, sharding, mesh, plan_batch(spec, mesh, roles), target)
    pipeline = plan_pipeline(tables, inputs)
    if pipeline and pipeline.shares_head:
        inputs = replace(inputs, sharding=share_head(sharding, mesh))
    operations, *_ = all_of(
        lambda: plan_operations(ops, inputs),
        lambda: check_gradients(spec, inputs.sharding),
        lambda: check_unroll(spec.overlap.layers.unroll, roles.partitioner, target),
        lambda: check_moments_on_host(spec, model, inputs.sharding, target),
    )
    options = options_by_traits(spec, target, most_shards(sharding.parameters, mesh, roles))
    return Layout(inputs, operations, pipeline, {**options, **preset_options})


def _plan_sharding(
    spec: PlanSpec, arrays: Arrays, mesh: MeshPlan, roles: AxisRoles, target: TargetPlan, *, layers_stay: bool
) -> ShardingPlan:
    """Returns the layouts; of a length that cannot be cut one error, and not one for each array that has it."""
    check_token_order(spec, mesh, roles, target)
    return plan_sharding(spec.sharding, arrays, mesh, roles, target.compiler, layers_stay=layers_stay)


def compile_plan(
    plan: Plan, devices: Sequence[Any], *, compile_step: Callable[[LoweredStep], Built] = compile_ahead
) -> CompiledStep:
    """Compiles the plan's step for devices, which need not be attached, and reads what the compiler made of it.
    compile_step: a caller's own, such as one that looks first among what was compiled before. Raises ConfigError for
    compiler options that are wrong and for a program that would hang, JaxRuntimeError where the compiler fails for
    another reason than memory."""
    estimate = estimate_declared(plan)
    declared_pgle = pgle_maker(plan.spec.overlap.pgle, plan.mesh.placement, plan.ops)
    lowered = replace(lower_ahead(plan, plan.mesh.of_devices(devices)), pgle=declared_pgle)
    built = compile_step(lowered)
    schedule, peak = read_text(built.text, plan, estimate.communication)
    return CompiledStep(plan, estimate, lowered, built, schedule, peak)


def report_of(
    step: CompiledStep,
    *,
    overrides: tuple[str, ...] = (),
    model: str | None = None,
    changes: tuple[MemoryChange, ...] = (),
    search: SearchReport | None = None,
    alternatives: tuple[Alternative, ...] = (),
) -> Report:
    """Returns the report of a compiled step, with its findings. overrides, model: the words that declared it, and their
    name for the model. changes: those that would make it fit. search: the search that chose it. alternatives: other
    declarations, by the estimate."""
    findings = find_findings(step, is_searched=search is not None)
    return build_report(
        step, findings, overrides=overrides, model=model, changes=changes, search=search, alternatives=alternatives
    )
