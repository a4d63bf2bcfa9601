"""Our logits against those of transformers, for a folder of published weights and real text, in float32 on the CPU.

    pip install -e '.[peers]' && python bench/parity.py DIR [--text FILE] [--num-tokens 256]

Both read the folder by themselves. Prints the largest difference of logits, over the largest logit, how often both
choose the same next token, and both losses; exits with 1 where logits differ by more than 1e-5 of the largest. In
bfloat16 they would tell nothing: there, torch alone differs from its own float32 by more than 1 % of the largest.
"""

import argparse
import calendar
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports] (an extra)
import transformers  # pyright: ignore[reportMissingImports] (an extra)

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_default_matmul_precision", "highest")

from meshloom.compiler.core.console import Console  # noqa: E402
from meshloom.compiler.declare.compose import Request, read_spec  # noqa: E402
from meshloom.models import Context, Model, split_aux  # noqa: E402
from meshloom.runtime.inference.open_weights import open_weights, start_session  # noqa: E402

TOLERANCE = 1e-5  # of the largest logit
CPU = ("target=cpu-1", "sharding=fsdp", "mesh.fsdp=1", "precision=float32", "global_batch_size=1")


def theirs(folder: str, text: str, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids (1, T) of the text, and logits (1, T, V)."""
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :num_tokens]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return ids.numpy(), model(ids).logits.numpy()


def ours(folder: str, ids: np.ndarray) -> np.ndarray:
    """Returns our logits of the same tokens."""
    overrides = ("model=from_hf", f"model.path={folder}", f"sequence_length={ids.shape[1]}", *CPU)
    session = start_session(read_spec(Request(overrides), then=lambda spec: spec))
    params = open_weights(session, Console(sys.stderr)).params
    return np.asarray(jax.jit(lambda params, ids: forward(session.plan.model, params, ids))(params, jnp.asarray(ids)))


def forward(model: Model, params: dict, ids: jax.Array) -> jax.Array:
    """Returns logits on one device, with nothing planned."""
    context = Context(jnp.arange(ids.shape[1])[None], lambda name, x, *axes, **options: x)
    x = model.embed.apply(params["embed"], ids, context)
    for stack in model.stacks:
        x, _ = jax.lax.scan(
            lambda x, layer, stack=stack: (split_aux(stack.layer.apply(layer, x, context))[0], None),
            x,
            params[stack.name],
        )
    return model.head.apply(model.head_params(params["head"], params["embed"]), x, context)


def loss(logits: np.ndarray, ids: np.ndarray) -> float:
    """Returns the mean cross-entropy of the next tokens."""
    log_p = jax.nn.log_softmax(logits[0, :-1])
    return -float(jnp.mean(jnp.take_along_axis(log_p, ids[0, 1:, None], axis=-1)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--text", type=Path, default=Path(str(calendar.__file__)), metavar="FILE")
    parser.add_argument("--num-tokens", type=int, default=256)
    arguments = parser.parse_args()
    ids, expected = theirs(arguments.folder, arguments.text.read_text(), arguments.num_tokens)
    found = ours(arguments.folder, ids)
    largest, difference = np.abs(expected).max(), np.abs(found - expected).max()
    same = (found.argmax(-1) == expected.argmax(-1)).mean()
    print(f"{ids.shape[1]} tokens: largest logit {largest:.1f}, largest difference {difference:.1e}", end="")
    print(f" = {difference / largest:.1e} of it; same next token {same:.1%}")
    print(f"loss {loss(found, ids):.6f}, of transformers {loss(expected, ids):.6f}")
    return 0 if difference <= TOLERANCE * largest else 1


if __name__ == "__main__":
    sys.exit(main())
