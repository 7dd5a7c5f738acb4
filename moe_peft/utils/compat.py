"""
Table of all private names of peft, trl, transformers and torch in use: overridden, called or read here.

There are no upper bounds on versions. Instead, `require` looks up the overridden names of `PRIVATE` when the overriding
module is imported, `private` looks up called names, and a test looks up all. If a new version has moved a name, an
error names it. Otherwise a hook would silently never be called.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

# The newest versions that tests passed with: all tests with the versions in `constraints.txt`, all but the slow tests
# with newer versions (`make test-latest`).
TESTED = {"torch": "2.14.1", "transformers": "5.24.0", "peft": "0.21.2", "trl": "1.16.0"}

# Set in `__init__`, so a lookup in the class does not find them; the test searches the class's source.
OF_INSTANCES = {
    "_active_adapter", "_disable_adapters", "_signature_columns", "_train_batch_size",
    "_created_lr_scheduler", "aux_loss_enabled",
}  # fmt: skip

# Module or class → names in it.
PRIVATE: dict[str, tuple[str, ...]] = {
    # Functions called by `adapter`: PEFT's lists of linear layers, which grow with its supported types.
    "peft.tuners.tuners_utils": ("_get_in_out_features", "_maybe_include_all_linear_layers"),
    # The tuner: hooks called by PEFT, overridden in `adapter.model`.
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
    # A module's own parameters as a plain dictionary, without calls of `__getattr__`, in `adapter.experts.lora`.
    "torch.nn.Module": ("_parameters",),
    # ZeRO-3's config, removed in `utils.loading` while models without weights are created.
    "transformers.integrations.deepspeed": ("_hf_deepspeed_config_weak_ref",),
    # The router modules of a native MoE, read in `models.introspection` and `adapter.base_model`; whether a model has
    # other states than keys and values, in `combine.request_gate`.
    "transformers.PreTrainedModel": ("_can_record_outputs", "_is_stateful"),
    # Resuming of native MoEs, and clipping, overridden in `training.mixins`. Token labels are kept as a column, as in
    # TRL's trainers (with `remove_unused_columns=False`, collators would get all columns).
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
    # Token labels, in `training.trainers`.
    "trl.SFTTrainer": ("_prepare_dataset", "aux_loss_enabled"),
    # The tensors of an adapter in training that are sent to vLLM, in `training.rollouts`.
    "trl.generation.vllm_generation.VLLMGeneration": ("_iter_named_params",),
    # The fused head, in `training.scoring` and UpIT's router initialization: never all logits at once, tested by TRL.
    "trl.trainer.utils.FusedCausalLMOutput": ("log_probs", "label_mask"),
    "trl.trainer.utils": ("add_fused_lm_head",),
    # Liger's function to bind its forwards, replaced in `adapter.liger`.
    "liger_kernel.transformers.monkey_patch": ("_bind_method_to_module",),
    # The modes of torch.compile, to check arguments.
    "torch._inductor": ("list_mode_options",),
    # Detects a layer running under a checkpoint, in `adapter.router_recorder` and `routing.routers`.
    "torch._C._autograd": ("_top_saved_tensors_default_hooks",),
}


def place(path: str) -> Any:
    """Return the module or class of a dotted path."""
    try:
        return import_module(path)
    except ImportError:
        module, _, name = path.rpartition(".")
        return getattr(import_module(module), name)


def private(module: str, name: str) -> Any:
    """Return the object of a name in `PRIVATE`. Raise an ImportError if the installed version lacks it."""
    value = getattr(place(module), name, None) if name in PRIVATE[module] else None
    if value is None:
        raise _moved(module, name)
    return value


def require(*paths: str) -> None:
    """Check that these classes still have the names overridden by the importing module."""
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
    Return whether a trainer's micro-batch losses add up to the optimizer step's loss. If not, they are averaged over
    accumulation steps. `Trainer.training_step` decides by the same attributes (public, undocumented).
    """
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is not None:
        return bool(scaled)
    return bool(
        (trainer.model_accepts_loss_kwargs and num_items_in_batch is not None) or trainer.compute_loss_func is not None
    )
