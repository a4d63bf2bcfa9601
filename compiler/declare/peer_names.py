"""Finds our words for what other tools call their settings: `lr=1e-4` is `optimizer.learning_rate=1e-4`.

One table for transformers, trl, torchtitan, MaxText, Megatron and Axolotl. Names that are the last part of one of our
keys are not in it: `learning_rate=` is found by the keys themselves.
"""

import os
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from ..core.key_paths import leaves
from .overrides import override_value, shortened

# What to type, and the names that other tools have for it. {}: the value that was typed; without it, the words stand
# for any value.
_TABLE: tuple[tuple[str, str], ...] = (
    ("optimizer.learning_rate={}", "lr max_lr peak_lr base_lr max_learning_rate peak_learning_rate"),
    ("global_batch_size={}", "batch_size train_batch_size bs batch gbs global_train_batch_size total_batch_size"),
    ("global_batch_size=N, over all devices and microbatches",
     "per_device_train_batch_size per_device_batch_size local_batch_size micro_batch_size micro_batch mbs"),
    ("num_microbatches={}", "gradient_accumulation_steps grad_accum grad_accum_steps gradient_accumulation "
     "accumulate_grad_batches accum_steps"),
    ("data.num_epochs={}", "epochs num_train_epochs n_epochs max_epochs epoch"),
    ("num_steps={}", "steps max_steps train_steps num_train_steps train_iters max_iters total_steps n_steps"),
    ("sequence_length={}", "seq_len seq_length max_seq_len max_seq_length max_length max_target_length context_length "
     "block_size cutoff_len sequence_len model_max_length ctx_len"),
    ("sharding=fsdp_tensor mesh.tensor={}", "tp tp_size tp_degree tensor_parallel tensor_parallel_size "
     "tensor_model_parallel_size tensor_parallel_degree ici_tensor_parallelism tensor_parallelism"),
    ("mesh.stage={}", "pp pp_size pp_degree pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size "
     "pipeline_parallel_degree ici_pipeline_parallelism num_stages"),
    ("sharding=fsdp_expert mesh.expert={}", "ep ep_size ep_degree expert_parallel expert_parallel_size "
     "expert_model_parallel_size expert_parallel_degree ici_expert_parallelism"),
    ("sharding=fsdp_context mesh.context={}", "cp cp_size cp_degree context_parallel context_parallel_size "
     "context_parallel_degree ici_context_parallelism sp sequence_parallel_size"),
    ("mesh.fsdp={}", "fsdp_size dp_shard data_parallel_shard_degree ici_fsdp_parallelism fsdp_parallelism"),
    ("sharding=ddp mesh.data={}", "dp dp_size dp_degree data_parallel data_parallel_size ici_data_parallelism"),
    ("sharding=hsdp mesh.replica={}", "dp_replicate data_parallel_replicate_degree"),
    ("schedule.num_warmup_steps={}", "warmup warmup_steps warmup_iters lr_warmup_steps"),
    ("schedule.num_warmup_steps=N, a number of steps", "warmup_ratio warmup_steps_fraction warmup_fraction"),
    ("schedule={}", "lr_scheduler lr_scheduler_type scheduler lr_schedule lr_decay_style"),
    ("optimizer.weight_decay={}", "wd adam_weight_decay"),
    ("optimizer.max_grad_norm={}", "grad_clip clip_grad clip_grad_norm gradient_clipping_threshold gradient_clip_val "
     "max_norm gradient_clip"),
    ("optimizer.b1={}", "beta1 adam_beta1 adam_b1"),
    ("optimizer.b2={}", "beta2 adam_beta2 adam_b2"),
    ("optimizer.epsilon={}", "eps adam_epsilon adam_eps"),
    ("optimizer={}", "optim opt_type"),
    ("precision=bfloat16", "bf16 use_bf16"),
    ("precision=bfloat16, float16 or float32", "mixed_precision torch_dtype amp"),
    ("precision=float16", "fp16"),
    ("remat=full", "gradient_checkpointing activation_checkpointing recompute activation_checkpoint remat_policy "
     "recompute_granularity"),
    ("adapter=lora", "use_lora use_peft peft lora"),
    ("adapter=lora adapter.rank={}", "lora_r lora_rank r"),
    ("adapter=lora adapter.alpha={}", "lora_alpha"),
    ("adapter=lora adapter.dropout={}", "lora_dropout"),
    ("adapter=lora 'adapter.targets=[layers/attention/*]'", "lora_target_modules target_modules lora_target"),
    ("model=from_hf model.path={}", "model_name_or_path model_name model_path base_model hf_model pretrained "
     "load_parameters_path"),
    ("data/tokenizer=huggingface data.tokenizer.path={}", "tokenizer_path tokenizer_name tokenizer_name_or_path"),
    ("model=MODEL, or of a published folder model=from_hf model.path=DIR", "model_id architecture"),
    ("data=jsonl 'data.source.paths=[{}]', or data=chats for chats", "dataset dataset_path dataset_name train_file "
     "data_path data_dir train_data datasets train_dataset dataset_text_field"),
    ("hydra.run.dir={}", "output_dir out_dir save_dir run_dir base_output_directory output outdir workdir"),
    ("checkpoint.every_num_steps={}", "save_steps save_interval checkpoint_period checkpoint_interval save_every"),
    ("checkpoint.keep={}", "save_total_limit keep_latest_k max_to_keep"),
    ("evaluation.every_num_steps={}", "eval_steps eval_interval eval_every"),
    ("evaluation.num_batches={}", "eval_iters max_eval_batches"),
    ("logging.every_num_steps={}", "logging_steps log_interval log_every log_freq log_period"),
    ("logging.trackers=[{}]", "report_to tracker log_with loggers"),
    ("run.name={}", "run_name experiment_name exp_name job_name"),
    ("hydra.run.dir=RUN_DIR of the run, with the line that it was started by: it goes on from where that stopped",
     "resume_from_checkpoint resume resume_from load_checkpoint"),
    ("checkpoint.weights_from={}", "init_from finetune_from pretrained_checkpoint"),
    ("data.held_out_fraction={}", "val_size test_size validation_split val_fraction val_set_size"),
    ("target=h100-{}, or the kind of chip that it is", "num_gpus n_gpus gpus nproc_per_node num_devices devices"),
    ("model.num_layers={}", "n_layers n_layer num_hidden_layers num_decoder_layers"),
    ("model.embed_dim={}", "hidden_size d_model emb_dim n_embd base_emb_dim"),
    ("model.mlp_dim={}", "intermediate_size d_ff ffn_hidden_size base_mlp_dim"),
    ("model.num_heads={}", "n_heads n_head num_attention_heads num_query_heads"),
    ("model.num_kv_heads={}", "n_kv_heads num_key_value_heads num_query_groups"),
    ("objective.beta={}", "dpo_beta"),
)  # fmt: skip
_PEERS = {name: words for words, names in _TABLE for name in names.split()}
_SHOWN = 3  # keys of one name
_SUFFIXES = {".jsonl": "jsonl", ".json": "jsonl", ".txt": "text_files", ".parquet": "parquet",
             ".array_record": "array_record"}  # fmt: skip


def meant_by_peers(key: str, value: Any, known: Iterable[str], *, is_loose: bool) -> str:
    """Returns what to type for a key that does not exist, or for each key below it; "" if no tool has one of the name.

    known: our keys. is_loose: the key lies in no section that exists, so that a key of the same name in any is meant.
    """
    below = [(f"{key}.{name}", of) for name, of in leaves(value)] if isinstance(value, Mapping) else [(key, value)]
    keys = list(known)
    return " ".join(dict.fromkeys(filter(None, (_words(each, of, keys, is_loose) for each, of in below))))


def _words(key: str, value: Any, known: list[str], is_loose: bool) -> str:
    name = key.rpartition(".")[2].replace("-", "_").lower()
    if value is False:  # `bf16=false` asks for nothing
        return ""
    if words := peer_words(name, _shown(value)):
        return words
    same = [each for each in known if each.rpartition(".")[2] == name] if is_loose else []
    same = get_close_matches(key, same, n=1, cutoff=0.8) or same  # a slip in the section's name
    return " or ".join(f"{each}={_shown(value)}" for each in same) if len(same) <= _SHOWN else ""


def peer_words(name: str, value: str) -> str:
    """Returns what to type for a name that another tool has, with the value; "" if none has it."""
    return _PEERS.get(name, "").format(value)


def _shown(value: Any) -> str:
    if isinstance(value, float):  # 2e-5
        return re.sub(r"e([+-])0*", r"e\1", f"{value:g}")
    return "..." if value in (None, "") else shortened(override_value(value), 60)


def meant_choice(group: str, name: str) -> str:
    """Returns what to type for an option of a group that is the name or the place of something else; "" if it is
    not."""
    if group == "model" and ("/" in name or os.path.isdir(name)):
        if os.path.isdir(name) or name.startswith((".", "/", "~")):
            return f"model=from_hf model.path={name}"
        return f"hf download {name} --local-dir DIR, then model=from_hf model.path=DIR"
    suffix = re.sub(r"\.(gz|zst|bz2|xz)$", "", name)
    kind = next((kind for end, kind in _SUFFIXES.items() if suffix.endswith(end)), "")
    if group == "data" and kind:
        chats = ", or data=chats if its lines are chats" if kind == "jsonl" else ""
        return f"data={kind} 'data.source.paths=[{name}]'{chats}"
    return ""
