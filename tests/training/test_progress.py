"""The progress bar of training, and what is logged if there is no bar."""

from __future__ import annotations

import logging

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from moe_peft.training.progress import StageProgress, show_progress
from moe_peft.training.resuming import train


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x, y):
        return {"loss": (self.weight * x - y).square().mean()}


class StopAfter(TrainerCallback):
    """Ends the process's training, as a kill would, but with bars closed."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


@pytest.fixture
def make(tmp_path):
    def trainer(**own):
        settings = {
            "output_dir": str(tmp_path), "max_steps": 6, "per_device_train_batch_size": 1, "logging_steps": 2,
            "save_steps": 2, "save_strategy": "no", "use_cpu": True, "report_to": "none", "disable_tqdm": False,
            "run_name": "toy-prepare",
        }  # fmt: skip
        data = Dataset.from_dict({"x": [1.0] * 6, "y": [2.0] * 6})
        return Trainer(Line(), TrainingArguments(**{**settings, **own}), train_dataset=data)

    return trainer


def test_one_bar_shows_name_steps_loss_and_time_left_and_no_dictionary_is_printed(make, capfd, caplog):
    caplog.set_level(logging.INFO, "moe_peft")
    trainer = make()
    train(trainer)
    out, error = capfd.readouterr()
    (last,) = error.splitlines()  # no terminal: one line, not one for each update
    assert last.startswith("toy-prepare 100%") and "6/6 steps" in last
    assert f"loss {trainer.state.log_history[-2]['loss']:.4g}" in last and last.endswith("left")
    assert out == "" and not caplog.messages
    callbacks = trainer.callback_handler.callbacks
    assert not any(isinstance(own, (ProgressCallback, PrinterCallback)) for own in callbacks)


def test_without_bars_each_record_is_a_line_of_the_log(make, capfd, caplog):
    caplog.set_level(logging.INFO, "moe_peft")
    train(make(disable_tqdm=True))
    assert "".join(capfd.readouterr()) == ""
    assert [message.partition(": loss")[0] for message in caplog.messages[:3]] == [
        "toy-prepare: step 2 of 6", "toy-prepare: step 4 of 6", "toy-prepare: step 6 of 6"
    ]  # fmt: skip
    assert "learning_rate" in caplog.messages[0] and "{" not in "".join(caplog.messages)


def test_a_terminal_shows_every_step_and_where_training_resumes(make, capfd, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    stopped = make()
    stopped.add_callback(StopAfter(4))
    with pytest.raises(KeyError):  # there is no checkpoint of the last step
        train(stopped)
    capfd.readouterr()
    train(make())
    shown = capfd.readouterr().err.replace("\r", "\n").strip().splitlines()
    assert "4/6 steps" in shown[0] and "6/6 steps" in shown[-1]


def test_a_long_training_writes_a_line_now_and_then(make, capfd, monkeypatch):
    monkeypatch.setattr("moe_peft.training.progress._SECONDS_PER_LINE", 0.0)
    train(make())
    assert [f"{step}/6 steps" in line for step, line in enumerate(capfd.readouterr().err.splitlines()[:6], 1)] == 6 * [
        True
    ]


def test_only_the_first_process_shows_anything(make, capfd, caplog):
    caplog.set_level(logging.DEBUG, "moe_peft")
    trainer = make()
    trainer.is_world_process_zero = lambda: False
    show_progress(trainer)
    trainer.train()
    assert "".join(capfd.readouterr()) == "" and not caplog.messages


def test_a_notebook_keeps_its_table(make, monkeypatch):
    class Table(TrainerCallback):
        pass

    for module in ("transformers.trainer", "moe_peft.training.progress"):
        monkeypatch.setattr(f"{module}.DEFAULT_PROGRESS_CALLBACK", Table)
    trainer = make()
    show_progress(trainer)
    kinds = [type(own) for own in trainer.callback_handler.callbacks]
    assert Table in kinds and StageProgress not in kinds
