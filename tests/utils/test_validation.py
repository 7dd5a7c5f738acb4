"""The border: what models and other classes take, and how it is said what they do not."""

from __future__ import annotations

import pytest

from moe_peft import MoEDPOConfig, MoELoraConfig, MoESFTConfig
from moe_peft.utils.validation import (
    Count,
    Settings,
    Share,
    Text,
    TextList,
    check_fields,
    prefixed,
    read_settings,
    read_yaml,
    validate,
)


class Section(Settings):
    name: Text
    count: Count = 3
    share: Share | None = None


class Run(Settings):
    section: Section
    other: Section | None = None
    data: Text | dict[str, object] = "x"
    names: TextList = ["a"]  # noqa: RUF012


def test_a_model_is_made_of_what_a_file_says():
    run = validate(Run, {"section": {"name": "a", "share": 1}, "data": {"path": "b"}})
    assert run.section == Section(name="a", share=1) and run.other is None and run.data == {"path": "b"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "section: must be given"),
        ({"section": {}}, "section.name: must be given"),
        ({"section": 3}, "section=3: must be a mapping"),
        ({"section": {"name": 3}}, "section.name=3: must be a valid string"),
        ({"section": {"name": " "}}, "section.name=' ': must be a string of printable characters"),
        ({"section": {"name": "a", "count": "1"}}, "section.count='1': must be a valid integer"),
        ({"section": {"name": "a", "count": True}}, "section.count=True: must be a valid integer"),
        ({"section": {"name": "a", "count": 0}}, "section.count=0: must be at least 1"),
        ({"section": {"name": "a", "share": float("nan")}}, "section.share=nan: must be a finite number"),
        ({"section": {"name": "a", "cuont": 2}}, "section.cuont: unknown key; did you mean 'count'?"),
        ({"sektion": {"name": "a"}}, "sektion: unknown key; did you mean 'section'?"),
        ({"section": {"name": "a"}, "other": {"x": 1}}, "other.x: unknown key; known: count, name, share"),
        (
            {"sektion": 1, "section": {"cuont": 2, "naem": 1}},
            "section.cuont: unknown key; did you mean 'count'? | section.naem: unknown key; did you mean 'name'? | "
            "sektion: unknown key; did you mean 'section'?",
        ),
        ({"section": {"name": "a"}, "names": []}, "names=[]: must have at least 1 item, not 0"),
        ({"section": {"name": "a"}, "data": 3}, "data=3: must be a valid string"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_section(values, message):
    with pytest.raises(ValueError) as error:
        validate(Run, values)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (MoESFTConfig, {"learning_rate": "1e-4"}, "sft.learning_rate='1e-4': must be a valid number"),
        (
            MoESFTConfig,
            {"max_steps": 10**30},
            f"sft.max_steps={10**30}: must be from 1 to 1,000,000,000, or -1 for num_train_epochs",
        ),
        (MoEDPOConfig, {"loss_type": []}, "sft.loss_type=[]: must be at least one"),
        (MoESFTConfig, {"output_dir": "a\0b"}, "sft.output_dir='a\\x00b': must be text without NUL"),
        (MoESFTConfig, {"learning_rate": -1.0}, "sft.learning_rate=-1.0: must be at least 0"),
        (MoESFTConfig, {"learning_rat": 1}, "sft.learning_rat: unknown key; did you mean 'learning_rate'?"),
        (
            MoESFTConfig,
            {"micro_batch_size": 1, "lora_r": 4},
            "sft.micro_batch_size: not a setting here; instead: per_device_train_batch_size",
        ),
        (MoESFTConfig, {"adam_beta2": 1.0}, "sft.adam_beta2=1.0: must be at least 0 and below 1"),
        (MoELoraConfig, {"top_k": 1.5}, "sft.top_k=1.5: must be a valid integer"),
        (
            MoEDPOConfig,
            {"train_sampling_strategy": "x"},
            "sft.train_sampling_strategy='x': must be one of random, sequential, group_by_length, batch_rebalance",
        ),
    ],
)
def test_fields_of_other_classes(kind, values, message):
    with pytest.raises(ValueError) as error:
        check_fields(kind, values, "sft")
    assert str(error.value).partition(" | ")[0] == message


@pytest.mark.parametrize("name", ["log_level", "log_level_replica", "ddp_backend", "truncation_mode"])
def test_names_that_transformers_checks_in_flags_alone(name):
    with pytest.raises(ValueError, match=f"^{name}='base': must be one of "):
        check_fields(MoESFTConfig, {name: "base"})


def test_values_of_other_classes():
    values = {"learning_rate": 1, "lr_scheduler_type": "cosine", "max_length": None, "expert_map": {1: [True]}}
    check_fields(MoESFTConfig, values)
    with pytest.raises(ValueError, match=r"^adapter: .*top_k=9: "), prefixed("adapter"):
        MoELoraConfig(top_k=9)


def test_a_home_folder_is_written_as_in_a_shell(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    text = "{a: ~/base, b: [~/x, '~', a~/b], c: {d: ~/y}, e: ~}"
    assert read_yaml(text, "file") == {
        "a": "/home/me/base", "b": ["/home/me/x", "~", "a~/b"], "c": {"d": "/home/me/y"}, "e": None,
    }  # fmt: skip


def test_numbers_are_those_of_yaml_1_2():
    text = "[010, -7, +3, 0o17, 0x1F, 1:30, 1_000, 1e-4, .5, 2., -.inf, 0b1]"
    assert read_yaml(text, "file") == [10, -7, 3, 15, 31, "1:30", "1_000", 1e-4, 0.5, 2.0, -float("inf"), "0b1"]


@pytest.mark.parametrize("text", ["a: 1\nnum_experts:4\n", "num_experts:4", "a:\n  b: 1\n  num_experts:4\nc: 1"])
def test_a_key_that_runs_into_its_value_is_named(text, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"run\.yaml: line \d: a space is missing after num_experts:$"):
        read_settings(tmp_path / "run.yaml")
    assert read_yaml("a: http://x\nb: 'x:4'", "text") == {"a": "http://x", "b": "x:4"}


def test_aliases_stand_for_a_finite_number_of_values():
    assert read_yaml("{a: &a [1, {b: 2}], c: *a, d: {<<: &d {e: *a}}, f: *d}", "file")["f"] == {"e": [1, {"b": 2}]}
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 12)]
    for text, why in (
        ("\n".join(["l0: &l0 x", *levels]), "more than 100000 values"),
        ("a: &a [*a]", "contains itself"),
    ):
        with pytest.raises(ValueError, match=f"file: cannot be read as YAML: .*{why}"):
            read_yaml(text, "file")
