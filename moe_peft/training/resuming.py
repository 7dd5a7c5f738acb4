"""Resumes the training of native MoEs from a checkpoint."""

from __future__ import annotations

from typing import Any

from peft import PeftModel

from ..models.view import native_routers
from ..native.routed import router_tensors


class NativeResumeMixin:
    """
    Lets a trainer resume native MoEs. transformers' own method (5.23) loads a checkpoint's tensors by their names on
    disk. Experts have other names in memory, so it does not load them.
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
        """Whether whole native MoEs are saved, by their own `save_pretrained`."""
        native = bool(native_routers(self.model)) and not isinstance(self.model, PeftModel)
        return native and not self.is_fsdp_enabled  # type: ignore[attr-defined]


def _load_native(model: Any, folder: str) -> None:
    """Load a checkpoint's weights into a native MoE, including those of routers in the place of its gates."""
    state = type(model).from_pretrained(folder, dtype="auto").state_dict()
    model.load_state_dict({**state, **router_tensors(model, folder)})
