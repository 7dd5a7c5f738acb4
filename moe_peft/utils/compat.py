"""
Every private name of peft, trl, transformers and torch that this package overrides, calls or reads, in one place.

`PRIVATE` lists them. There are no upper bounds on versions: `require` looks up overridden names when the part that
overrides them is imported, `private` those that are called, and a test all of them. A name that a new version has moved
raises an error that says which, instead of leaving a hook that nobody calls.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

# The newest versions that tests passed with: all tests with those of `constraints.txt`, all but the slow ones with
# newer versions (`make test-latest`).
TESTED = {"torch": "2.14.1", "transformers": "5.24.0", "peft": "0.21.2", "trl": "1.16.0"}

# Set in `__init__`, so the class does not show whether they still exist; the test reads its source.
OF_INSTANCES = {
    "_active_adapter", "_disable_adapters", "_signature_columns", "_train_batch_size",
    "_created_lr_scheduler", "aux_loss_enabled",
}  # fmt: skip

# Module or class → names in it.
PRIVATE: dict[str, tuple[str, ...]] = {
    # Functions that `adapter` calls: PEFT's own lists of linears, which grow with what it supports.
    "peft.tuners.tuners_utils": ("_get_in_out_features", "_maybe_include_all_linear_layers"),
    # The tuner: hooks that PEFT calls, overridden in `adapter.model`.
    "peft.tuners.tuners_utils.BaseTuner": (
        "_prepare_adapter_config",
        "_prepare_model",
        "_create_and_replace",
        "_replace_module",
        "_check_target_module_exists",
        "_check_merge_allowed",
        "_unload_and_optionally_merge",
        "_remove_adapter_name_from_key",
        "_remap_adapter_state_dict_for_load",
        "_add_modules_to_save_to_tie",
    ),
    # `PeftModel` enters the first if the tuner has it; the second is the same for all tuners.
    "peft.tuners.lora.LoraModel": ("_enable_peft_forward_hooks", "_add_modules_to_save_to_tie"),
    # The tuner layers, in `adapter.layers`.
    "peft.tuners.tuners_utils.BaseTunerLayer": (
        "_active_adapter",
        "_disable_adapters",
        "_get_base_layer_device_and_dtype",
        "_move_adapter_to_device_of_base_layer",
    ),
    # A module's own parameters without its `getattr`, in `adapter.experts.lora`.
    "torch.nn.Module": ("_parameters",),
    # ZeRO-3's config, taken away in `utils.loading` where models without weights are made.
    "transformers.integrations.deepspeed": ("_hf_deepspeed_config_weak_ref",),
    # Which modules of a native MoE are routers, read in `models.introspection` and `adapter.base_model`.
    "transformers.PreTrainedModel": ("_can_record_outputs",),
    # Resuming of native MoEs, and clipping, overridden in `training.mixins`; labels of tokens as a column that is kept,
    # as TRL's own trainers keep theirs (with `remove_unused_columns=False`, collators would get all columns).
    "transformers.Trainer": (
        "_clip_grad_norm",
        "_get_grad_norm",
        "_load_from_checkpoint",
        "_load_best_model",
        "_set_signature_columns_if_needed",
        "_signature_columns",
        "_created_lr_scheduler",
        "_train_batch_size",
    ),
    # Labels of tokens, in `training.trainers`.
    "trl.SFTTrainer": ("_prepare_dataset", "aux_loss_enabled"),
    # What vLLM is sent of an adapter in training, in `training.rollouts`.
    "trl.generation.vllm_generation.VLLMGeneration": ("_iter_named_params",),
    # The fused head, in `training.scoring` and UpIT's router initialization: never all logits at once, tested by TRL.
    "trl.trainer.utils.FusedCausalLMOutput": ("log_probs", "label_mask"),
    "trl.trainer.utils": ("add_fused_lm_head",),
    # What Liger binds its forwards with, replaced in `adapter.liger`.
    "liger_kernel.transformers.monkey_patch": ("_bind_method_to_module",),
    # The modes of torch.compile, for a check of arguments.
    "torch._inductor": ("list_mode_options",),
    # Whether a layer runs under a checkpoint, in `adapter.router_recorder` and `routing.routers`.
    "torch._C._autograd": ("_top_saved_tensors_default_hooks",),
}


def place(path: str) -> Any:
    """The module or class of a dotted path."""
    try:
        return import_module(path)
    except ImportError:
        module, _, name = path.rpartition(".")
        return getattr(import_module(module), name)


def private(module: str, name: str) -> Any:
    """The object that a name in `PRIVATE` refers to."""
    value = getattr(place(module), name, None) if name in PRIVATE[module] else None
    if value is None:
        raise _moved(module, name)
    return value


def require(*paths: str) -> None:
    """Look up the names that the importing module overrides in these classes."""
    for path in paths:
        for name in PRIVATE[path]:
            if name not in OF_INSTANCES and not hasattr(place(path), name):
                raise _moved(path, name)


def _moved(path: str, name: str) -> ImportError:
    package = path.partition(".")[0]
    tested = f"; the newest that it was tested with is {package}=={TESTED[package]}" if package in TESTED else ""
    return ImportError(f"moe_peft needs {path}.{name}, which {package} {version(package)} lacks{tested}")


def loss_is_of_whole_step(trainer: Any, num_items_in_batch: Any) -> bool:
    """
    Whether a trainer's micro-batch losses add up to that of the optimizer step, rather than being averaged over
    accumulation steps afterwards. `Trainer.training_step` decides this by the same attributes (public, undocumented).
    """
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is not None:
        return bool(scaled)
    return bool(
        (trainer.model_accepts_loss_kwargs and num_items_in_batch is not None) or trainer.compute_loss_func is not None
    )
