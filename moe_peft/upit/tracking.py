"""Where trackers write what a stage's trainer reports."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate.utils import patch_environment


@contextmanager
def tracked(root: Path, stage: str) -> Iterator[None]:
    """
    Inside this block, TensorBoard writes to `<root>/logs/<stage>`, which stays when the stage's state is removed, and
    Weights & Biases makes one run, which belongs to the group of the whole run. Variables of the user's go first.
    """
    defaults = {"TENSORBOARD_LOGGING_DIR": str(root / "logs" / stage), "WANDB_RUN_GROUP": root.name}
    with patch_environment(**{key: value for key, value in defaults.items() if key not in os.environ}):
        try:
            yield
        finally:
            wandb = sys.modules.get("wandb")
            if wandb is not None and wandb.run is not None:
                wandb.finish()
