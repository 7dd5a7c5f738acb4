"""What a training logs arrives in the loggers that people use, without a network."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Dataset

from moe_peft import MoELoraConfig, MoESFTConfig, MoESFTTrainer
from tests.helpers.models import tiny_llama
from tests.helpers.user_folder import in_folder

pytestmark = pytest.mark.slow

LOGGED = {"loss", "learning_rate", "aux_loss", "router_entropy", "load_cv", "compliance"}


def in_tensorboard(folder: Path) -> set[str]:
    """Records of a length, its checksum, an event and its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    names, (file,) = set(), folder.rglob("events.out.tfevents.*")
    data, at = file.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack("<Q", data[at : at + 8])
        names |= {value.tag for value in Event.FromString(data[at + 12 : at + 12 + length]).summary.value}
        at += 16 + length
    return names


def in_trackio(folder: Path) -> set[str]:
    (file,) = folder.glob("trackio/*.db")
    with sqlite3.connect(file) as database:
        return {name for (row,) in database.execute("SELECT metrics FROM metrics") for name in json.loads(row)}


def in_wandb(folder: Path) -> set[str]:
    """The file's format is W&B's own, in which names are text."""
    (file,) = folder.rglob("run-*.wandb")
    return {name.decode() for name in re.findall(rb"train/\w+", file.read_bytes())}


def train(logger: str) -> None:
    from tests.helpers.words import word_tokenizer

    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(Path("trackio").absolute())}
    rows = [{"text": f"w{5 + i} w9 w{7 + i}", "domain": "ab"[i % 2]} for i in range(8)]
    args = MoESFTConfig(
        "out", max_steps=2, logging_steps=1, report_to=logger, per_device_train_batch_size=4, bf16=False, use_cpu=True,
        gradient_checkpointing=False, save_strategy="no", label_column="domain", expert_map={"a": [0], "b": [1]},
        disable_tqdm=True,
    )  # fmt: skip
    config = MoELoraConfig(num_experts=2, top_k=1, r=2, task_type="CAUSAL_LM")
    data, tokenizer = Dataset.from_list(rows), word_tokenizer(model_max_length=64)
    trainer = MoESFTTrainer(
        tiny_llama(vocab=128), args, train_dataset=data, processing_class=tokenizer, peft_config=config
    )
    trainer.train()
    if logger == "wandb":
        import wandb

        wandb.finish()


@pytest.mark.parametrize(("logger", "read"), [
    ("tensorboard", in_tensorboard), ("trackio", in_trackio), ("wandb", in_wandb),
])  # fmt: skip
def test_losses_and_loads_arrive_under_one_heading(logger: str, read: Callable[[Path], set[str]], tmp_path: Path):
    in_folder(tmp_path, train, logger)
    assert {f"train/{name}" for name in LOGGED} <= read(tmp_path)
