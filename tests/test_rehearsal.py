"""What the last stage would trip over is said before the first one, by the run and by its plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer
from upit_case import contents, make_case, run

from moe_peft.upit import UpIT, recipe_from_dict
from moe_peft.upit.evaluation_stage import Evaluate
from moe_peft.upit.plan import plan

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} {% endfor %}"
HASH = {"router_type": "hash", "router_aux_loss_coef": 0.0}


def with_sft(section: str, **sft):
    return {section: {"sft": sft}}


@pytest.fixture
def case(tmp_path, tokenizer):
    return make_case(tmp_path, tokenizer)


def merged(settings: dict, change: dict) -> dict:
    found = dict(settings)
    for key, value in change.items():
        found[key] = (
            merged(found[key], value) if isinstance(value, dict) and isinstance(found.get(key), dict) else value
        )
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_sft("post_train", eos_token="<no>"), "post_train.sft: .*eos_token.*<no>"),
        (with_sft("prepare", pad_token="<no>"), "prepare.sft: .*pad_token.*<no>"),
        (with_sft("post_train", padding_free=True), "post_train.sft: .*padding_free=True"),
        (with_sft("post_train", fsdp="full_shard"), "post_train.sft: .*fsdp"),
        (
            with_sft("post_train", torch_compile=True, torch_compile_backend="nope"),
            "post_train.sft.torch_compile_backend='nope': must be one of",
        ),
        (with_sft("post_train", chat_template_path="/no"), "post_train.sft.chat_template_path='/no': no tokenizer"),
        ({"sft": {"max_length": 2}}, "sft: max_length=2: no example keeps a token to learn from"),
        (with_sft("router_init", max_length=2), "router_init.sft: max_length=2: no example keeps a token"),
        (with_sft("post_train", max_length=2), "post_train.sft: max_length=2: no example keeps a token"),
        ({"sft": {"pad_to_multiple_of": 0}}, "sft.pad_to_multiple_of=0: must be at least 1"),
        (with_sft("router_init", optim="adafactor"), "router_init: optim='adafactor': mixes the experts"),
        (with_sft("router_init", fp16=True, bf16=False), "router_init: fp16=True, max_grad_norm=1"),
        (
            {"adapter": HASH, "router_init": {"buckets": "none"}, **with_sft("post_train", router_z_loss_coef=0.1)},
            "post_train.sft.router_z_loss_coef=0.1: must be 0: these routers go by token ids alone",
        ),
        (
            {
                "adapter": HASH,
                "router_init": {"buckets": "none"},
                **with_sft("post_train", expert_map={"a": [0], "b": [1], "c": [2]}),
            },
            "post_train.sft.router_label_loss_coef=1.0: must be 0: these routers go by token ids alone",
        ),
        ({"router_init": {"capacity": 3, "buckets": "random"}}, "router_init.capacity=3: must be null"),
        (
            {"prepare": {"num_experts": None, "experts": "copies", "num_checkpoints": 3}},
            "prepare.num_checkpoints=3: must be null",
        ),
        ({"evaluate": {"limit": 3}}, "evaluate.limit=3.0: is of evaluate.tasks, which are none"),
    ],
)
def test_it_is_said_before_the_first_stage(change, words, case, tmp_path, monkeypatch):
    """And nothing is written, not even the folder."""
    for name in ("BACKEND", "MODE"):  # which training arguments set
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", "x")
        monkeypatch.delenv(f"ACCELERATE_DYNAMO_{name}")
    settings = merged({**case, "output_dir": str(tmp_path / "out")}, change)
    before = contents(tmp_path)
    for start in (UpIT.run, plan):
        with pytest.raises(ValueError, match=f"^{words}") as error:
            start(UpIT(recipe_from_dict(settings)))
        assert type(error.value) is ValueError and "\n" not in str(error.value) and len(str(error.value)) < 400
        assert contents(tmp_path) == before and not (tmp_path / "out").exists()


def test_one_long_example_is_enough(case, tmp_path):
    """The sample that is rehearsed first has none."""
    path = Path(case["data"]["train"])
    short = {"prompt": " ".join(["w3"] * 12), "completion": " w4", "domain": "a"}
    good = {"prompt": "w3", "completion": " w4 w5", "domain": "a"}
    path.write_text("\n".join(json.dumps(row) for row in [*[short] * 150, good]))
    settings = {**case, "output_dir": str(tmp_path / "out"), "sft": {**case["sft"], "max_length": 8}}
    settings["router_init"] = {"buckets": "none"}
    UpIT(recipe_from_dict(settings)).check(weights=False)
    path.write_text("\n".join(json.dumps(row) for row in [short] * 150))
    with pytest.raises(ValueError, match=r"^sft: max_length=8: no example keeps"):
        UpIT(recipe_from_dict(settings)).check(weights=False)


def chats(case: dict) -> dict:
    """The case with conversations."""
    for name in ("train", "eval"):
        path = Path(case["data"][name])
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text(
            "\n".join(
                json.dumps(
                    {
                        "messages": [
                            {"role": "user", "content": row["prompt"]},
                            {"role": "assistant", "content": row["completion"]},
                        ],
                        "domain": row["domain"],
                    }
                )
                for row in rows
            )
        )
    return case


def test_a_stages_own_chat_template_decides_its_result(case, tmp_path):
    """It is read, checked and hashed as that of all stages, and the result is evaluated with it."""
    template = tmp_path / "own.jinja"
    template.write_text(TEMPLATE)
    (tmp_path / "all.jinja").write_text(TEMPLATE.replace(": ", " - "))
    settings = {**chats(case), "router_init": {"buckets": "none"}}
    settings["sft"] = {**case["sft"], "chat_template_path": str(tmp_path / "all.jinja")}
    settings = merged(settings, with_sft("post_train", chat_template_path=str(template)))
    first = run(settings, tmp_path)
    assert AutoTokenizer.from_pretrained(first.result).chat_template == TEMPLATE
    stage = first.stages[-1]
    assert isinstance(stage, Evaluate) and stage._tokenizer().chat_template == TEMPLATE
    template.write_text(TEMPLATE.replace(": ", " = "))
    outlook = UpIT(recipe_from_dict({**settings, "output_dir": str(first.root)})).outlook()
    assert outlook["prepare"] == "done" and outlook["post_train"].startswith("again: inputs.chat_template")
    template.write_text(
        TEMPLATE.replace("'content'", "'nothing'").replace("{% endfor %}", "{{ raise_exception('x') }}")
    )
    with pytest.raises(ValueError, match=r"chat template does not take messages"):
        UpIT(recipe_from_dict({**settings, "output_dir": str(tmp_path / "new")})).check()


def test_tasks_through_a_chat_template_that_is_not_there(case, tmp_path, monkeypatch):
    monkeypatch.setattr("moe_peft.upit.evaluation_stage.load_harness", lambda settings: None)
    settings = {**case, "output_dir": str(tmp_path / "out"), "evaluate": {"tasks": ["x"], "apply_chat_template": True}}
    with pytest.raises(ValueError, match=r"evaluate\.apply_chat_template=True: .*set sft.chat_template_path"):
        UpIT(recipe_from_dict(settings)).check(weights=False)
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    settings["sft"] = {**case["sft"], "chat_template_path": str(tmp_path / "own.jinja")}
    UpIT(recipe_from_dict(settings)).check(weights=False)


def loras(folder: Path, base: str, count: int, **own) -> list[str]:
    for i in range(count):
        torch.manual_seed(i)
        config = LoraConfig(r=6, lora_alpha=12, task_type="CAUSAL_LM", init_lora_weights=False, **own)
        model = get_peft_model(tiny_llama(vocab=128), config)
        model.peft_config["default"].base_model_name_or_path = base
        model.save_pretrained(folder / f"lora{i}")
    return [str(folder / f"lora{i}") for i in range(count)]


def test_given_adapters_say_what_experts_are(case, tmp_path):
    """The plan has their numbers, and a recipe that says otherwise is refused rather than ignored."""
    folders = loras(tmp_path, case["model"]["name_or_path"], 3, target_modules=["up_proj", "down_proj"])
    settings = {**case, "num_experts": 4, "prepare": {"adapters": folders}, "adapter": {"top_k": 2}}
    settings["output_dir"] = str(tmp_path / "out")
    planned = {stage.name: stage.trainable for stage in plan(UpIT(recipe_from_dict(settings)))}
    pipeline = run(settings, tmp_path)
    weights = (pipeline.result / "adapter_model.safetensors").stat().st_size
    assert planned["post_train"] == 2 * (4 * 6 * (64 + 128) * 2 + 4 * 64)  # layers × (experts × r × … + router)
    assert weights == pytest.approx(4 * planned["post_train"], rel=0.02)
    for own, words in (
        ({"r": 4}, "adapter.r=4: those of prepare.adapters have 6"),
        ({"r": 6, "lora_alpha": 6}, "adapter.lora_alpha=6: those of prepare.adapters have 12"),
        ({"target_projections": ["up_proj"]}, r"adapter.target_projections=\['up_proj'\]: those .*'down_proj'"),
    ):
        changed = {**settings, "adapter": {"top_k": 2, **own}, "output_dir": str(tmp_path / "other")}
        with pytest.raises(ValueError, match=words):
            plan(UpIT(recipe_from_dict(changed)))
        with pytest.raises(ValueError, match=words):
            UpIT(recipe_from_dict(changed)).run()
    same = {"r": 6, "lora_alpha": 12, "target_projections": ["up_proj", "down_proj"]}
    plan(UpIT(recipe_from_dict({**settings, "adapter": {"top_k": 2, **same}})))


def test_a_model_card_of_the_base_decides_nothing(case, tmp_path):
    pipeline = run(case, tmp_path)
    (Path(case["model"]["name_or_path"]) / "README.md").write_text("A base.")
    outlook = UpIT(recipe_from_dict({**case, "output_dir": str(pipeline.root)})).outlook()
    assert set(outlook.values()) == {"done"}
