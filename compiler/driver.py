"""The straight line, a pass per line. A decision belongs inside its pass."""

from .config.spec import RunSpec
from .core.errors import all_of
from .jaxpr.flops import model_flops_per_step
from .parallel.attention import plan_attention
from .parallel.embedding import plan_look_ups
from .parallel.lm_head import plan_head
from .parallel.loss import plan_loss_blocks
from .parallel.matmul import plan_projections
from .parallel.remat import check_remat
from .plan import Plan, plan_memory, plan_state_arrays
from .sharding.arrays import build_model, find_arrays
from .sharding.batch import check_batch, check_length
from .sharding.gradients import check_gradients
from .sharding.optimizer_state import build_optimizer, check_schedule
from .sharding.sharding import check_rules, plan_sharding, usable_mesh
from .sharding.state import plan_state, update_layouts
from .target.compiler_options import check_unroll, plan_set_options
from .target.mesh import plan_mesh
from .target.target import plan_target


def plan_run(spec: RunSpec) -> Plan:
    """Decide everything that can be decided without a compiler. Raises ConfigError with all that cannot run."""
    model = build_model(spec)
    target = plan_target(spec.target, spec.precision.compute)
    arrays = find_arrays(spec, model)
    mesh, *_ = all_of(
        lambda: plan_mesh(usable_mesh(spec), target),
        lambda: check_rules(spec.sharding, arrays),
        lambda: check_schedule(spec),
        lambda: check_remat(spec.remat, arrays),
    )
    sharding, attention, set_options, *_ = all_of(
        lambda: plan_sharding(spec.sharding, arrays, mesh),
        lambda: plan_attention(spec, target),
        lambda: plan_set_options(spec.overlap.option_sets, target),
        lambda: check_batch(spec, mesh),
        lambda: check_length(spec, model),
    )
    num_loss_blocks = plan_loss_blocks(spec, sharding, mesh, target)
    look_ups, projections, head, *_ = all_of(
        lambda: plan_look_ups(spec, model, arrays.looked_up, sharding, mesh),
        lambda: plan_projections(spec, arrays.projected, sharding, mesh, target),
        lambda: plan_head(spec, model, sharding, mesh, target, num_loss_blocks),
        lambda: check_gradients(spec, sharding),
        lambda: check_unroll(spec.overlap.layers.unroll, mesh.besides(sharding.batch_axes), target),
    )
    optimizer = build_optimizer(spec, model, update_layouts(model, sharding), mesh)
    abstract, specs = plan_state(spec, model, optimizer, sharding, mesh)
    return Plan(
        spec=spec,
        target=target,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        sharding=sharding,
        optimizer_state=plan_state_arrays(abstract, specs, sharding.optimizer, mesh),
        abstract=abstract,
        specs=specs,
        attention=attention,
        look_ups=look_ups,
        projections=projections,
        head=head,
        num_loss_blocks=num_loss_blocks,
        memory=plan_memory(spec, mesh, sharding, abstract, specs),
        model_flops_per_step=model_flops_per_step(model, spec),
        set_options=set_options,
    )
