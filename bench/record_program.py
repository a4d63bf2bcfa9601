"""Another framework's train step, as its own command compiles it: the text of the program, and where its devices lie.

    python bench/record_program.py NAME MODULE [ARGUMENTS]

Runs `python -m MODULE ARGUMENTS` in that framework's environment (of Meshloom it needs nothing), and of each program
for more than one TPU keeps NAME.txt and NAME.json, of several the last. `bench/peer.py` reads them. MaxText:

    python3.12 -m venv peer && peer/bin/pip install --no-deps maxtext==0.2.5
    peer/bin/pip install jax==0.10.2 jaxlib==0.10.2 libtpu==0.0.42.1 flax optax orbax-checkpoint grain aqtp \
        qwix tokamax transformers datasets sentencepiece tiktoken tensorboardx ml-collections omegaconf pydantic \
        drjax einshape jaxtyping jsonlines psutil tabulate chex pathwaysutils cloud-accelerator-diagnostics \
        ml-goodput-measurement pillow jinja2 google-cloud-mldiagnostics google-cloud-storage typeguard \
        parameterized responses nltk evaluate
    peer/bin/python bench/record_program.py 8b maxtext.trainers.pre_train.train_compile \
        compile_topology=v5p-128 compile_topology_num_slices=1 model_name=llama3-8b per_device_batch_size=4 \
        max_target_length=2048 dataset_type=synthetic remat_policy=full attention=flash
"""

import json
import os
import runpy
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

# That libtpu compiles without a TPU it reads where it is loaded.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4",
               "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # fmt: skip

import jax
from jax.experimental import xla_metadata

# MaxText 0.2.5 imports it for a kernel that these steps do not run; jax 0.10 has no such name.
if not hasattr(xla_metadata, "must_fuse_call"):
    xla_metadata.must_fuse_call = None  # pyright: ignore[reportAttributeAccessIssue]


def record(compiled: Any, name: Path, facts: dict[str, Any]) -> None:
    """The devices in the order of the program's own numbers, which its replica groups are of."""
    shardings = jax.tree.leaves(compiled.input_shardings)
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, jax.sharding.NamedSharding)]
    if not meshes or meshes[0].size == 1:
        return
    (mesh,) = set(meshes)
    assert isinstance(mesh, jax.sharding.Mesh)
    memory = compiled.memory_analysis()
    devices = [
        {
            "coords": list(device.coords),
            "core_on_chip": device.core_on_chip,
            "slice_index": getattr(device, "slice_index", 0),
        }
        for device in mesh.devices.flat
    ]
    found = {"mesh": dict(mesh.shape), "peak_bytes": memory.peak_memory_in_bytes, "devices": devices}
    name.with_suffix(".txt").write_text(compiled.as_text())
    name.with_suffix(".json").write_text(json.dumps(facts | found))


def main() -> None:
    name, module, *arguments = sys.argv[1:]
    compile_plainly = jax.stages.Lowered.compile

    def compile_recorded(lowered: Any, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        compiled = compile_plainly(lowered, *args, **options)
        facts = {
            "command": [module, *arguments],
            "versions": f"jax {version('jax')}, libtpu {version('libtpu')}, {module.split('.')[0]} "
            f"{version(module.split('.')[0])}",
            "compile_seconds": round(time.perf_counter() - start, 1),
        }
        record(compiled, Path(name), facts)
        return compiled

    jax.stages.Lowered.compile = compile_recorded  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
