"""Mixins for our trainers: clipping by full norms, saving of finite weights only, resuming of native MoEs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import gather_object
from peft import PeftModel
from torch import nn
from torch.distributed.tensor import DTensor

from ..models.layer import native_layers
from ..native.router_files import router_tensors
from ..routing.routers import Router
from ..utils.compat import require
from ..utils.messages import InputError

require("transformers.Trainer", "trl.SFTTrainer")
logger = logging.getLogger("moe_peft")

# --- saving ----------------------------------------------------------------------------------------------------------

_HALF = (torch.bfloat16, torch.float16)


class FiniteWeightsMixin:
    """
    Mixin for a Trainer: refuses to save weights that are not finite, and warns if rounding would lose small steps. The
    shards of ZeRO-3 are not checked.
    """

    args: Any
    model: Any
    state: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    is_world_process_zero: Any

    def train(self, *args: Any, **kwargs: Any) -> Any:
        keeps_float32 = self.is_fsdp_enabled or self.is_deepspeed_enabled  # a copy of the weights
        trained = [p for p in self.model.parameters() if p.requires_grad and p.dtype in _HALF]
        quantized = getattr(self.model, "is_quantized", False)  # TRL makes its adapters bfloat16
        if trained and not keeps_float32 and not quantized and self.is_world_process_zero():
            logger.warning(
                "learning_rate=%g: %s parameters are trained in %s, where a weight changes by no less than a %s of "
                "itself: smaller steps are lost; load the model in float32 (bf16=True still computes in bfloat16)",
                self.args.learning_rate,
                f"{sum(p.numel() for p in trained):,}",
                str(trained[0].dtype).removeprefix("torch."),
                "256th" if trained[0].dtype == torch.bfloat16 else "2048th",
            )
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model. Raise if a trained weight is not finite."""
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        bad = [name for name, parameter in trained if not _largest(parameter).isfinite()][:1]
        if self.is_fsdp_enabled:  # each process has its own shards; one bad shard stops all
            bad = gather_object(bad)
        for name in bad[:1]:
            raise InputError(
                f"learning_rate={self.args.learning_rate}: after step {self.state.global_step}, {name} is not finite, "
                f"and {output_dir or self.args.output_dir} was not saved; use a lower learning rate, or max_grad_norm"
            )
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]


@torch.no_grad()
def _largest(parameter: torch.Tensor) -> torch.Tensor:
    """
    Return the largest absolute value of this process's part of a parameter, without a temporary tensor of its size.
    """
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return torch.linalg.vector_norm(local, torch.inf) if local.numel() else torch.zeros(())


# --- resuming --------------------------------------------------------------------------------------------------------


class NativeResumeMixin:
    """
    Mixin for a Trainer: resumes native MoEs. transformers (5.23) loads a checkpoint's tensors by their names on disk.
    Experts have other names in memory, so transformers does not load them.
    """

    model: Any

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._is_plain_native():
            _load_native(self.model if model is None else model, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        if self._is_plain_native():
            _load_native(self.model, self.state.best_model_checkpoint)  # type: ignore[attr-defined]
        else:
            super()._load_best_model()  # type: ignore[misc]

    def _is_plain_native(self) -> bool:
        """Return whether complete native MoEs are saved, by their own `save_pretrained`."""
        native = bool(native_layers(self.model)) and not isinstance(self.model, PeftModel)
        return native and not self.is_fsdp_enabled  # type: ignore[attr-defined]


def _load_native(model: Any, folder: str) -> None:
    """Load a checkpoint's weights into a native MoE, including routers that replaced its gates."""
    state = type(model).from_pretrained(folder, dtype="auto").state_dict()
    model.load_state_dict({**state, **router_tensors(model, folder)})


# --- clipping --------------------------------------------------------------------------------------------------------


@contextmanager
def full_norm(model: nn.Module) -> Iterator[None]:
    """
    Scale gradients inside the block, so that their norm counts a parameter once for each equal parameter it stands for
    (`Router.stands_for`). Undo this afterwards, up to rounding.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    counts = {getattr(router, name): count for router in routers for name, count in router.stands_for.items()}
    counted = [(p.grad, count**0.5) for p, count in counts.items() if p.grad is not None]
    for grad, root in counted:
        grad.mul_(root)
    yield
    for grad, root in counted:
        grad.div_(root)


class FullNormMixin:
    """
    Mixin for a Trainer: clips by the norm of `full_norm`, and logs it. DeepSpeed does its own clipping, without
    `full_norm`.
    """

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        with full_norm(model):
            return super()._clip_grad_norm(model)  # type: ignore[misc]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        with full_norm(model) if grad_norm is None else nullcontext():  # None: nothing was clipped
            return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
