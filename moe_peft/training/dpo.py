"""`MoEDPOTrainer`: TRL's `DPOTrainer` with losses on the routers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trl import DPOConfig, DPOTrainer

from ..cards import TAGS
from .resuming import NativeResumeMixin
from .router_losses import RouterLossConfig, RouterLossesMixin


@dataclass
class MoEDPOConfig(RouterLossConfig, DPOConfig):
    """`DPOConfig` with the fields of `RouterLossConfig`. Losses that need labels are skipped."""


class MoEDPOTrainer(RouterLossesMixin, NativeResumeMixin, DPOTrainer):
    """`DPOTrainer` with losses on the routers; see `MoEDPOConfig` and `RouterLossesMixin`."""

    _tag_names: ClassVar[list[str]] = [*DPOTrainer._tag_names, *TAGS]
