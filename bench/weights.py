"""Measures import and export of weights: time, and the anonymous memory of the host above the parameters themselves.

    python bench/weights.py 2            # a folder of 2 GiB in bfloat16, on 8 simulated devices

Memory is RssAnon of /proc/self/status: pages of mapped files are not in it, as the system may drop them.
"""

import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "16")  # threads for 8 devices (runtime/processes/devices.py)

import jax
import jax.numpy as jnp
import numpy as np

from meshloom.compiler.core.console import Console
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.models.published import tensors, write_config
from meshloom.runtime.checkpoint.checkpoints import Checkpoints
from meshloom.runtime.core.files import replace_json
from meshloom.runtime.weights.export import prepare_export, run_export
from meshloom.runtime.weights.find import find_weights
from meshloom.runtime.weights.load import load_params
from meshloom.runtime.weights.write import OutTensor, shards_of, write_tensors

MODEL = (
    "model=llama3_8b", "model.num_heads=16", "model.num_kv_heads=16", "model.embed_dim=2048", "model.head_dim=128",
    "model.mlp_dim=8192", "model.vocab_size=32768", "sequence_length=64", "global_batch_size=8", "data=synthetic",
    "target=cpu-8", "sharding=fsdp", "precision=bfloat16_pure", "logging=quiet", "checkpoint.every_num_steps=1",
)  # fmt: skip
LAYER_BYTES = 2 * (4 * 2048 * 2048 + 3 * 2048 * 8192)


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Peak:
    """The largest anonymous memory within the `with`, above that at its start; and its seconds, of clock and CPU."""

    def __enter__(self) -> Self:
        self._ended, self._most = threading.Event(), 0
        self._before, self._began, self._cpu = anonymous_bytes(), time.perf_counter(), time.process_time()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self._most = max(self._most, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.seconds, self.cpu_seconds = time.perf_counter() - self._began, time.process_time() - self._cpu
        self.above_start = self._most - self._before

    def line(self, what: str, num_bytes: int, held: int) -> str:
        rate = num_bytes / self.seconds / 2**30
        more = (self.above_start - held) / 2**20
        times = f"{self.seconds:.1f} s ({self.cpu_seconds:.1f} of CPU), {rate:.2f} GiB/s"
        return f"{what}: {times}, {more:.0f} MiB above {held / 2**20:.0f}"


def main(num_gib: float, folder: Path) -> None:
    num_layers = max(1, round(num_gib * 2**30 / LAYER_BYTES))
    words = (*MODEL, f"model.num_layers={num_layers}")
    spec = read_spec(Request(words), then=lambda spec: spec)
    published = folder / "published"
    published.mkdir()
    rng, base = np.random.default_rng(0), {}

    def values(shape: tuple[int, ...]) -> Any:
        if shape not in base:
            base[shape] = (0.02 * rng.standard_normal(shape, np.float32)).astype(jnp.bfloat16)
        return iter([base[shape]])

    made = [
        OutTensor(t.name, t.shape, np.dtype(jnp.bfloat16), lambda t=t: values(t.shape)) for t in tensors(spec.model)
    ]
    listed = {}
    for n, shard in enumerate(shards_of(made, 2**29), 1):
        write_tensors(published / f"model-{n}.safetensors", shard, lambda _: None)
        listed |= {tensor.name: f"model-{n}.safetensors" for tensor in shard}
    replace_json(published / "model.safetensors.index.json", {"weight_map": listed})
    replace_json(published / "config.json", write_config(spec.model, dtype="bfloat16", max_length=64))
    base.clear()
    num_bytes = sum(tensor.num_bytes for tensor in made)
    largest = max(tensor.num_bytes for tensor in made)
    print(f"{num_bytes / 2**20:.0f} MiB in {len(made)} tensors, the largest {largest / 2**20:.0f} MiB")

    plan = plan_run(read_spec(Request((*words, f"checkpoint.weights_from=hf:{published}")), then=lambda spec: spec))
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = plan.mesh.of_devices(jax.devices()[:8])
    weights = find_weights(plan)
    assert weights is not None
    quiet = Console(is_quiet=True)
    with Peak() as peak:
        params = jax.block_until_ready(load_params(plan, mesh, weights, quiet))
    print(peak.line("import", num_bytes, num_bytes))

    run = folder / "run"
    with Checkpoints(run, plan.spec) as checkpoints:
        checkpoints.save(1, {"step": jnp.int32(1), "params": params}, _NoData(), num_tokens=0, eval_loss=None)
    del params
    more = (f"checkpoint.weights_from={run}", f"export.directory={folder / 'out'}")
    job = prepare_export(read_spec(Request((*words, *more)), then=lambda spec: spec), open_merged=lambda _: {})
    with Peak() as peak:
        run_export(job, quiet)
    print(peak.line("export", num_bytes, 0))


class _NoData:
    identity: dict[str, Any] = {}  # noqa: RUF012

    def get_state(self) -> dict[str, int]:
        return {}

    def set_state(self, state: Any) -> None:
        del state


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 2, Path(place))
