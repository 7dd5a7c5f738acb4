"""`MoEDPOTrainer`: TRL's `DPOTrainer` with losses on the routers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from trl import DPOConfig, DPOTrainer

from ..cards import TAGS
from .arguments import check_dataset
from .resuming import NativeResumeMixin
from .router_losses import RouterLossConfig, RouterLossesMixin


@dataclass
class MoEDPOConfig(RouterLossConfig, DPOConfig):
    """`DPOConfig` with the fields of `RouterLossConfig`. Losses that need labels are skipped."""


class MoEDPOTrainer(RouterLossesMixin, NativeResumeMixin, DPOTrainer):
    """`DPOTrainer` with losses on the routers; see `MoEDPOConfig` and `RouterLossesMixin`."""

    _tag_names: ClassVar[list[str]] = [*DPOTrainer._tag_names, *TAGS]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_dataset("MoEDPOTrainer", kwargs.get("train_dataset"), ["chosen"])
        super().__init__(*args, **kwargs)
