"""
Keys of other programs' configs → their equivalents in `moe-peft sft` and `moe-peft dpo`, in `moe-peft mix` and in
recipes. docs/coming-from.md lists the first table.
"""

from __future__ import annotations

_LEAVE_OUT = "leave it out"
_ADAPTER = "adapter, if it is a MoE-LoRA adapter; a LoRA: merge it into its base first"
_EVALUATED = "a test split of dataset_name, such as a folder's test.jsonl beside its train.jsonl, with eval_strategy"
_TRAINED = "leave it out: prompts have no loss where rows have prompt and completion; else assistant_only_loss"

# Key, or key and value → its equivalent here.
FOREIGN: dict[str, str] = {
    # the model
    "model": "model_name_or_path",
    "base_model": "model_name_or_path",
    "model_type": _LEAVE_OUT,
    "tokenizer_type": _LEAVE_OUT,
    "torch_dtype": "dtype",
    "bf16: auto": "leave it out for bfloat16; false where no GPU computes in it",
    "flash_attention": "attn_implementation: flash_attention_2",
    "flash_attn": "attn_implementation",
    "use_flash_attention_2": "attn_implementation: flash_attention_2",
    "quantization_bit": "load_in_4bit: true, or load_in_8bit: true",
    "special_tokens": "eos_token and pad_token",
    # the adapter
    "adapter: lora": "leave it out: an adapter is trained anyway, and adapter names one to train further",
    "adapter: qlora": "load_in_4bit: true; adapter names one to train further",
    "finetuning_type": "leave it out: an adapter is trained anyway",
    "lora_r": "r, the rank of one expert, with num_experts and top_k; leave lora_alpha out",
    "lora_rank": "r, the rank of one expert, with num_experts and top_k; leave lora_alpha out",
    "rank": "r, the rank of one expert, with num_experts and top_k; leave lora_alpha out",
    "lora_parameters": "r, the rank of one expert, with num_experts and top_k; leave lora_alpha out",
    "lora_target": "target_modules; leave it out for every FFN; all is all-linear here",
    "lora_target_modules": "target_modules; leave it out for every FFN",
    "lora_target_linear": "target_modules: all-linear; leave it out for every FFN",
    "target_modules: all": "target_modules: all-linear; leave it out for every FFN",
    "lora_modules_to_save": "modules_to_save",
    "additional_target": "modules_to_save",
    "lora_task_type": _LEAVE_OUT,
    "use_dora": "leave it out: experts are plain LoRAs",
    "lora_model_dir": _ADAPTER,
    "adapter_name_or_path": _ADAPTER,
    # the data
    "data": "dataset_name",
    "val_dataset": _EVALUATED,
    "dataset": "dataset_name",
    "datasets": "dataset_name",
    "dataset_mixer": "dataset_name",
    "dataset_mixture": "dataset_name",
    "dataset_dir": "dataset_name, a file or a folder",
    "dataset_prepared_path": "leave it out: datasets has a cache",
    "dataset_splits": "dataset_train_split and dataset_test_split",
    "max_samples": "dataset_train_split: train[:1000]",
    "val_set_size": _EVALUATED,
    "val_size": _EVALUATED,
    "preprocessing_num_workers": "dataset_num_proc",
    "max_seq_length": "max_length",
    "sequence_len": "max_length",
    "cutoff_len": "max_length",
    "sample_packing": "packing",
    "eval_sample_packing": "eval_packing",
    "pad_to_sequence_len": "leave it out, or pad_to_multiple_of",
    "group_by_length": "train_sampling_strategy: group_by_length",
    "template": "leave it out: it names a template of LLaMA-Factory's, and the model's own is used",
    "chat_template": "chat_template_path: a .jinja file, or a tokenizer that has it; left out, the model's own",
    "train_on_inputs": _TRAINED,
    "train_on_prompt": _TRAINED,
    "roles_to_train": "assistant_only_loss",
    # the training
    "stage": "the command: moe-peft sft or moe-peft dpo",
    "rl": "the command: moe-peft dpo",
    "micro_batch_size": "per_device_train_batch_size",
    "batch_size": "per_device_train_batch_size",
    "iters": "max_steps",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "warmup_ratio": "warmup_steps; a number below 1 is a share of all steps",
    "evaluation_strategy": "eval_strategy",
    "evals_per_epoch": "eval_strategy: epoch; or steps, with eval_steps, below 1 a share of all steps",
    "saves_per_epoch": "save_strategy: epoch; or save_steps, below 1 a share of all steps",
    "overwrite_output_dir": "leave it out: output_dir is new or empty, or resume_from_checkpoint: true goes on in it",
    "enable_liger_kernel": "use_liger_kernel",
    "use_unsloth": _LEAVE_OUT,
    "plot_loss": "leave it out: trainer_state.json has the losses; or report_to",
    "wandb_name": "run_name",
    "wandb_project": "the environment's WANDB_PROJECT, with report_to: wandb",
    "wandb_entity": "the environment's WANDB_ENTITY",
    "wandb_run_id": "the environment's WANDB_RUN_ID",
    "wandb_watch": "the environment's WANDB_WATCH",
    "wandb_log_model": "the environment's WANDB_LOG_MODEL",
}

# The same for `moe-peft mix`, with keys of mergekit-moe among others.
FOREIGN_TO_MIX: dict[str, str] = {
    "base_model": "base, of adapters; models need none",
    "model": "base, of adapters",
    "model_name_or_path": "base, of adapters",
    "experts": "adapters or models, with prompts for each",
    "loras": "adapters",
    "gate_mode": "gates: ridge, prompts or arrow",
    "experts_per_token": "top_k",
    "num_experts_per_tok": "top_k",
    "shared_experts": "moe-peft upcycle, with --num-shared-experts",
    "merge_method": "leave it out: experts are routed, not merged",
    "dataset": "data",
    "datasets": "data",
    "dataset_name": "data",
    "max_seq_length": "max_length",
    "output_dir": "output",
}

# The same for a recipe's top level.
FOREIGN_TO_RECIPES: dict[str, str] = {
    **dict.fromkeys(("base_model", "model_name", "model_name_or_path"), "model.name_or_path"),
    **dict.fromkeys(("dataset", "datasets", "dataset_name"), "data.train"),
    **dict.fromkeys(("r", "rank", "lora_r", "lora_rank"), "adapter.r, the rank of one expert"),
    **{name: f"adapter.{name}" for name in ("lora_alpha", "lora_dropout", "router_type", "mixing")},
    "top_k": "adapter.top_k, or moe.top_k in the mode ffn",
    "replay": "rows in data.train that moe_peft.with_replay makes",
    "num_epochs": "num_train_epochs",
    **dict.fromkeys(("micro_batch_size", "batch_size"), "sft.per_device_train_batch_size"),
    **dict.fromkeys(("max_seq_length", "sequence_len", "cutoff_len"), "sft.max_length"),
    **{
        name: f"sft.{name}"
        for name in (
            "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "optim",
            "lr_scheduler_type", "warmup_steps", "weight_decay", "bf16", "packing",
        )
    },
}  # fmt: skip
