"""`MoEDPOTrainer`: TRL's `DPOTrainer` with losses on the routers."""

from __future__ import annotations

from dataclasses import dataclass

from trl import DPOConfig, DPOTrainer

from .resuming import NativeResumeMixin
from .router_losses import RouterLossConfig, RouterLossesMixin


@dataclass
class MoEDPOConfig(RouterLossConfig, DPOConfig):
    """`DPOConfig` and the routers' losses, see [`RouterLossConfig`]. Losses that need labels do not count."""


class MoEDPOTrainer(RouterLossesMixin, NativeResumeMixin, DPOTrainer):
    """See [`MoEDPOConfig`] and [`RouterLossesMixin`]."""
