"""
Usual options of the commands that train, for their short help. The options are fields of TRL's and PEFT's classes, and
their imports take seconds. `arguments` makes the complete parser.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..utils.foreign import FOREIGN
from ..utils.messages import unknown_keys
from .help import GroupedParser, prepare_help
from .settings import check_files, check_models

if TYPE_CHECKING:
    from .arguments import TrainingParser

# Group → option → placeholder of its value, help text, and default.
_MODEL = {
    "model_name_or_path": ("NAME", "The model: a folder, or a name on the hub.", None),
    "dataset_name": ("NAME", "The data: a file, a folder, or a dataset's name.", None),
    "load_in_4bit": ("true|false", "Hold the base's weights in 4 bits (bitsandbytes).", False),
}
_ADAPTER = {
    "num_experts": ("N", "Experts in every targeted module.", 8),
    "top_k": ("N", "Experts per token.", 2),
    "r": ("N", "Rank of every expert.", 8),
    "lora_alpha": ("X", "Scaling numerator: s = lora_alpha / r; by default 2 * top_k * r.", None),
    "router_type": ("NAME", "How experts are chosen: linear, switch, sigmoid, arrow and others.", "linear"),
}
_LOSSES = {
    "router_aux_loss_coef": ("X", "Load-balancing loss.", None),
    "router_z_loss_coef": ("X", "z-loss: keeps router logits small.", 0.0),
}
_LABELS = {
    "label_column": ("NAME", "The data's label column.", None),
    "expert_map": ("JSON", "Label → experts.", None),
}
_TRAINING = {
    "output_dir": ("FOLDER", "Folder for the result.", None),
    "per_device_train_batch_size": ("N", "Examples per step and device.", 8),
    "num_train_epochs": ("X", "Passes over the data.", 3.0),
    "max_steps": ("N", "Optimizer steps, in place of passes; -1: none.", -1),
    "learning_rate": ("X", "", None),
    "max_length": ("N", "Tokens per example; longer ones are truncated.", 1024),
    "bf16": ("true|false", "Compute in bfloat16; by default yes, which needs a device that can.", None),
    "resume_from_checkpoint": ("VALUE", "Go on from the last checkpoint (true), or from this one.", None),
}
_OTHER = {
    "config": ("FILE", "a YAML file with any of these settings, and with plugins", None),
    "adapter": ("FOLDER", "Train this MoE-LoRA adapter further instead of a new one.", None),
    "dry_run": ("true|false", "Print the plan and stop.", False),
}
_Options = dict[str, dict[str, tuple[str, str, Any]]]
_REPLAY = {
    "replay": ("X", "Share of rows that are general requests with the base's own answers, e.g. 0.2.", 0.0),
}
SFT: _Options = {
    "Model and data": {**_MODEL, **_REPLAY},
    "MoE adapter": _ADAPTER,
    "Router losses": {**_LOSSES, **_LABELS},
    "Training": _TRAINING,
    "": _OTHER,
}
_BETA = {"beta": ("X", "How strongly deviation from the reference is penalized.", 0.1)}
DPO: _Options = {**SFT, "Model and data": _MODEL, "Router losses": _LOSSES, "Training": {**_TRAINING, **_BETA}}


class UsualOptions(GroupedParser):
    """
    Short help of a command that trains. Arguments are passed on to the complete parser.

    Args:
        config: the trainer's config, a class in `training.trainers`.
        options: the groups of the short help.
        rates: the default learning rate, as text for the help.
    """

    def __init__(self, config: str, options: _Options, rates: str, **kwargs: Any) -> None:
        groups = {title: names for title, names in options.items() if title}
        super().__init__(groups=groups, allow_abbrev=False, usage="%(prog)s [--config FILE] [options]", **kwargs)
        self.config, self.rates, self.made_with = config, f"Learning rate (default: {rates}).", kwargs
        for name, (metavar, text, default) in chain(*(names.items() for names in options.values())):
            text = self.rates if name == "learning_rate" else text
            nargs = "?" if metavar == "true|false" else None
            self.add_argument(f"--{name}", metavar=metavar, help=text, default=default, nargs=nargs)

    def complete(self) -> TrainingParser:
        """Create the parser with all options."""
        from ..training import trainers  # only now: these imports take seconds
        from .arguments import TrainingParser

        parser = TrainingParser(getattr(trainers, self.config), **self.made_with)
        parser.actions["learning_rate"].help = self.rates
        return parser

    def parse_args(self, arguments: Sequence[str]) -> Any:  # type: ignore[override]
        everything = "--help-all" in arguments
        given = self.parse_known_args([each for each in arguments if each != "--help-all"])[0]
        file = self.settings_in(given.config)
        if not everything and not unknown_keys(file, file, foreign=FOREIGN):  # otherwise the complete parser raises
            self._check_paths({**file, **_given(given)})
        parser = self.complete()
        parser.file = file
        parser.error = self.error  # type: ignore[method-assign]
        if everything:
            parser.add_argument("--help-all", action="help")
            prepare_help(parser, (), everything=True)
        return parser.parse_args(arguments, given.config)

    def _check_paths(self, settings: dict[str, Any]) -> None:
        """Raise if the model or the data do not exist. The complete parser raises for values that are not texts."""
        model = settings.get("adapter") or settings.get("model_name_or_path")
        data = settings.get("dataset_name")
        if isinstance(model, str) and isinstance(data, str):
            check_models(**{"adapter" if "adapter" in settings else "model_name_or_path": model})
            check_files(dataset_name=data)


def _given(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if value is not None}
