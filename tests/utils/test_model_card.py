"""Model cards lead with loading code that runs, name base, license and training, and leave alone what users wrote."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from huggingface_hub import HfApi, ModelCard, ModelCardData
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig
from trl import SFTTrainer

from moe_peft import MoELoraConfig, expert_to_lora, write_model_card
from moe_peft.native import UpcycleConfig, export_adapter, upcycle
from tests.helpers.native_case import adapter, dense_model
from tests.helpers.trainers import arguments, make_model, make_trainer
from tests.helpers.upit_case import rows

CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
UNFILLED = "[More Information Needed]"
LICENSE = {"license": "other", "license_name": "tiny-license", "license_link": "LICENSE.txt"}
COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TERMS = ("LICENSE.txt", "NOTICE", "USE_POLICY.md")


def run_snippet(folder: Path) -> dict:
    """Runs the code of a card as its reader would; returns its names."""
    (code,) = CODE.findall((folder / "README.md").read_text())
    assert "path/to/this/folder" in code
    names: dict = {}
    exec(code.replace("path/to/this/folder", str(folder)), names)
    return names


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer) -> Path:
    """A base with all that a model's folder may have."""
    folder = tmp_path_factory.mktemp("bases") / "tiny-base"
    model = dense_model("llama")
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0, max_length=77)
    model.save_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    tokenizer.chat_template = None
    for name in TERMS:
        (folder / name).write_text(f"terms: {name}")
    ModelCard(f"---\n{ModelCardData(**LICENSE)}\n---\n# My base\n").save(folder / "README.md")
    return folder


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    """A saved adapter."""
    adapter(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter", str(base))
    return tmp_path / "adapter"


@pytest.mark.parametrize("origin", [r"C:\Users\NAME\models\tiny-base", "/home/name/tiny-base", "tiny-base"])
def test_a_card_names_the_last_part_of_a_base_of_any_system(origin: str, folder: Path):
    card = ModelCard.load(write_model_card(folder, base=origin))
    assert "for tiny-base" in card.text and "- Base model: `tiny-base`" in card.text and "NAME" not in card.text


def test_card_of_an_adapter_leads_with_what_it_is_and_with_code_that_runs(folder: Path, capsys):
    card = ModelCard.load(folder / "README.md")
    lines = card.text.strip().splitlines()
    assert "delete this line to keep your edits" in lines[0]
    assert lines[2] == "# MoE-LoRA adapter for tiny-base"
    assert "4 experts of the kind `lora`" in lines[4] and "picks 2 of them" in lines[4]
    assert lines[6] == "- Base model: `tiny-base`"
    assert lines.index("## How to load") < 10 and UNFILLED not in card.text
    assert {"peft", "moe_peft", "mixture-of-experts"} <= set(card.data.tags)
    assert (card.data.library_name, card.data.pipeline_tag) == ("peft", "text-generation")
    assert (card.data.license, card.data.license_name) == ("other", "tiny-license")
    assert card.data.license_link is None  # the file is not in this folder
    assert card.data.base_model is None  # the hub refuses local paths
    assert str(folder.parent) not in str(card)
    names = run_snippet(folder)
    assert names["model"].peft_config["default"].peft_type == "MOE_LORA"
    assert capsys.readouterr().out.strip()  # it has generated


def test_base_of_the_hub_and_public_data_are_metadata(folder: Path):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "org/Base-2.5"}))
    write_model_card(folder, datasets=["org/data-1.0", "my/train.jsonl"], training=["3 steps"], repo="me/mine")
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "org/Base-2.5" and card.data.datasets == ["org/data-1.0"]
    assert "- Base model: [org/Base-2.5](https://huggingface.co/org/Base-2.5)" in card.text
    assert "[org/data-1.0](https://huggingface.co/datasets/org/data-1.0), `train.jsonl`" in card.text
    assert 'AutoPeftModelForCausalLM.from_pretrained("me/mine")' in card.text
    before = (folder / "README.md").read_bytes()
    write_model_card(folder, repo="me/mine")  # facts about data and training stay
    assert (folder / "README.md").read_bytes() == before


@pytest.mark.parametrize("written", ["all", "without the mark"])
def test_text_that_a_user_wrote_stays(written: str, folder: Path):
    path = folder / "README.md"
    own = "# Mine\n\nMy words.\n"
    if written != "all":
        own = ModelCard.load(path).text.partition("-->")[2].replace("tiny-base", "our base")
    ModelCard(f"---\nlicense: mit\ntags: [own]\n---\n{own}").save(path)
    MoELoraConfig.from_pretrained(folder).save_pretrained(folder)
    write_model_card(folder, training=["3 steps"], datasets=["org/data"])
    card = ModelCard.load(path)
    assert card.text.strip() == own.strip()
    assert card.data.license == "mit" and {"own", "moe_peft"} <= set(card.data.tags)
    assert card.data.datasets == ["org/data"]
    write_model_card(folder, training=["3 steps"], overwrite=True)
    assert "3 steps" in path.read_text() and "My words" not in path.read_text() and "our base" not in path.read_text()


def test_saving_again_keeps_the_card_and_its_facts(folder: Path, base: Path):
    model = adapter(AutoModelForCausalLM.from_pretrained(base), folder, str(base))
    path = folder / "README.md"
    before = path.read_bytes()
    model.save_pretrained(folder)
    assert path.read_bytes() == before
    for training in ([], ["3 steps --> and <b>more</b>"], []):
        write_model_card(folder, training=training)
        model.save_pretrained(folder)
    text = path.read_text()
    assert text.count("\n- 3 steps --> and <b>more</b>\n") == 1 and text.count("-->") == 2
    path.write_text(text.replace('{"base"', "{base"))
    write_model_card(folder, training=["4 steps"])
    assert "\n- 4 steps\n" in path.read_text()


def test_a_card_that_a_kill_left_empty_is_written_when_the_model_is_saved_again(folder: Path, base: Path):
    """PEFT adds its versions to it first."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    (folder / "README.md").write_text("")
    model.save_pretrained(folder)
    assert "# MoE-LoRA adapter" in (folder / "README.md").read_text()


@pytest.mark.parametrize("share", [0, 0.3, 0.9])
def test_what_a_kill_left_of_pefts_card_is_replaced(share: float, folder: Path, monkeypatch):
    path = folder / "README.md"
    template = f"---\nlibrary_name: peft\n---\n{ModelCard.from_template(ModelCardData()).text}"
    path.write_text(template[: int(share * len(template))])
    real, targets = ModelCard.save, []
    monkeypatch.setattr(ModelCard, "save", lambda card, target: (targets.append(Path(target)), real(card, target)))
    MoELoraConfig.from_pretrained(folder).save_pretrained(folder)
    assert "# MoE-LoRA adapter" in path.read_text() and UNFILLED not in path.read_text()
    assert targets and path not in targets, "written whole, under another name first"


UNREADABLE = (b"---\njust a rule\n---\nText", b"---\nlicense: [unclosed\n---\n", b"caf\xe9", b"---\n1: 2\n---\n")


def test_no_card_stops_a_save(base: Path, tmp_path: Path, caplog):
    shutil.copytree(base, tmp_path / "base")
    of_base, folder = tmp_path / "base" / "README.md", tmp_path / "adapter"
    of_base.write_text("---\nlicense:\n- apache-2.0\n- mit\n---\nhi")
    adapter(AutoModelForCausalLM.from_pretrained(base), folder, str(of_base.parent))
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == ["apache-2.0", "mit"]
    config = MoELoraConfig.from_pretrained(folder)
    for written in UNREADABLE:
        of_base.write_bytes(written)
        caplog.clear()
        (folder / "README.md").unlink()
        config.save_pretrained(folder)
        card = ModelCard.load(folder / "README.md")
        assert card.data.license is None and "# MoE-LoRA adapter for base" in card.text
        (line,) = [r.getMessage() for r in caplog.records if r.name == "moe_peft"]
        assert line.startswith(f"{of_base}: ignored") and "\n" not in line
        (folder / "README.md").write_bytes(written)  # of the folder itself
        config.save_pretrained(folder)
        assert (folder / "README.md").read_bytes() == written
    of_base.unlink()
    write_model_card(folder, overwrite=True)
    assert "# MoE-LoRA adapter" in (folder / "README.md").read_text()


def test_what_may_be_a_local_path_is_no_name_on_the_hub(folder: Path, tmp_path: Path, monkeypatch):
    path = folder / "README.md"
    (tmp_path / "outputs" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("outputs/base", str(tmp_path / "gone" / "base"), "base"):
        write_model_card(folder, base=name, datasets=["data/train.jsonl"], tags=[f"base_model:adapter:{name}"])
        card = ModelCard.load(path)
        assert card.data.base_model is None and card.data.datasets is None and "huggingface.co" not in str(card)
        assert "- Base model: `base`" in card.text and "- Training data: `train.jsonl`" in card.text
        assert not any(tag.startswith("base_model:") for tag in card.data.tags)


def test_a_license_is_passed_on_if_the_bases_agree(folder: Path, tmp_path: Path):
    for name, license in (("a", "mit"), ("b", "mit"), ("c", "apache-2.0"), ("d", None)):
        (tmp_path / name).mkdir()
        ModelCard(f"---\n{ModelCardData(license=license).to_yaml() or 'tags: [x]'}\n---\n").save(
            tmp_path / name / "README.md"
        )
    for names, expected in (("ab", "mit"), ("ac", None), ("ad", None), ("d", None)):
        (folder / "README.md").unlink()
        write_model_card(folder, base=[tmp_path / name for name in names])
        assert ModelCard.load(folder / "README.md").data.license == expected


def test_a_card_written_for_another_base_has_its_license(folder: Path, tmp_path: Path):
    """One that the user wrote stays, and so does what the base's card said when that cannot be read any more."""
    for name, license in (("a", "mit"), ("b", "llama3")):
        (tmp_path / name).mkdir()
        ModelCard(f"---\n{ModelCardData(license=license)}\n---\n").save(tmp_path / name / "README.md")

    def license_of(base: str, datasets: list[str]) -> tuple:
        data = ModelCard.load(write_model_card(folder, base=tmp_path / base, datasets=datasets)).data
        return data.license, data.datasets

    assert license_of("a", ["a/one"]) == ("mit", ["a/one"])
    (tmp_path / "a" / "README.md").unlink()
    assert license_of("a", []) == ("mit", ["a/one"])
    assert license_of("b", ["a/two"]) == ("llama3", ["a/two"])
    text = (folder / "README.md").read_text()
    (folder / "README.md").write_text(text.replace("license: llama3", "license: apache-2.0"))
    assert license_of("a", []) == ("apache-2.0", ["a/two"])


@pytest.mark.parametrize("task_type", [None, "SEQ_CLS"])
def test_code_for_other_tasks(task_type: str | None, base: Path, tmp_path: Path):
    config = MoELoraConfig(num_experts=2, r=2, task_type=task_type, base_model_name_or_path=str(base))
    get_peft_model(AutoModelForCausalLM.from_pretrained(base).model, config).save_pretrained(tmp_path)
    code = CODE.findall((tmp_path / "README.md").read_text())[0]
    assert code.startswith("import moe_peft") and "generate" not in code
    assert ("AutoPeftModelForSequenceClassification" if task_type else "PeftModel.from_pretrained(base") in code
    if task_type is None:
        assert "MoELoraModel" in repr(run_snippet(tmp_path)["model"])


@pytest.mark.parametrize("labels", [1, 3])
def test_card_of_a_classifier_loads_its_head(labels: int, base: Path, tmp_path: Path):
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)
    config = MoELoraConfig(num_experts=2, r=2, task_type="SEQ_CLS")
    model = get_peft_model(model, config)
    model.save_pretrained(tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data.pipeline_tag == "text-classification"
    loaded = run_snippet(tmp_path)["model"]
    torch.testing.assert_close(
        loaded.base_model.model.score.modules_to_save["default"].weight,
        model.base_model.model.score.modules_to_save["default"].weight,
        rtol=0,
        atol=0,
    )


@pytest.mark.parametrize("made", ["upcycle", "export"])
def test_native_folders_carry_what_goes_with_the_base(made: str, base: Path, folder: Path, tmp_path: Path, capsys):
    target = tmp_path / "native"
    if made == "export":
        export_adapter(folder, target)
    else:
        upcycle(base, target, UpcycleConfig(num_experts=4))
    for name in (*COMPANIONS, *TERMS):
        assert (target / name).read_bytes() == (base / name).read_bytes(), name
    card = ModelCard.load(target / "README.md")
    assert UNFILLED not in card.text and f"- Made by `moe-peft {made}`" in card.text
    assert "`mixtral` with 4 experts per layer, of which each token uses 2" in card.text
    assert {name: getattr(card.data, name) for name in LICENSE} == LICENSE  # the file is here, too
    assert {"moe_peft", "mixture-of-experts"} <= set(card.data.tags) and card.data.library_name == "transformers"
    model = run_snippet(target)["model"]
    assert model.config.model_type == "mixtral" and model.generation_config.max_length == 77
    assert capsys.readouterr().out.strip()


def test_extracted_expert_and_other_adapters_have_a_card(base: Path, tmp_path: Path):
    model = adapter(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter", str(base))
    expert_to_lora(model, 1, tmp_path / "expert")
    assert "one expert of a MoE-LoRA adapter" in (tmp_path / "expert" / "README.md").read_text()
    run_snippet(tmp_path / "expert")
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM"))
    plain.save_pretrained(tmp_path / "lora")
    write_model_card(tmp_path / "lora", base=base)
    card = ModelCard.load(tmp_path / "lora" / "README.md")
    assert UNFILLED not in card.text and "mixture-of-experts" not in card.data.tags
    run_snippet(tmp_path / "lora")


def test_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no adapter_config\.json and no config\.json; save it first"):
        write_model_card(tmp_path)


@pytest.mark.parametrize("kind", ["adapter", "mixtral"])
def test_trainers_push_a_folder_with_the_card(kind: str, base: Path, tmp_path: Path, tokenizer, monkeypatch):
    model = make_model(kind)
    model.config._name_or_path = str(base)
    if kind == "adapter":
        model.peft_config["default"].base_model_name_or_path = str(base)
    trainer = make_trainer(tmp_path / "out", tokenizer, model=model, max_steps=2, hub_model_id="me/mine")
    trainer.create_model_card()  # as TRL does before a checkpoint is written
    assert not (tmp_path / "out" / "README.md").exists()
    trainer.train()
    pushed: dict = {}

    def upload(self, *, repo_id, folder_path, **own):
        pushed[repo_id] = shutil.copytree(folder_path, tmp_path / "pushed")

    monkeypatch.setattr(HfApi, "upload_folder", upload)
    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **own: type("Url", (), {"repo_id": repo_id})())
    trainer.push_to_hub(dataset_name="org/data", tags="extra")
    card = ModelCard.load(pushed["me/mine"] / "README.md")
    assert UNFILLED not in card.text
    assert "- Training data: [org/data]" in card.text and card.data.datasets == ["org/data"]
    assert "`MoESFTTrainer` with TRL" in card.text and "2 steps of 4 rows, learning rate 0.01" in card.text
    assert {"trl", "sft", "moe_peft", "mixture-of-experts", "extra"} <= set(card.data.tags)
    assert card.data.license_name == "tiny-license"
    assert ("import moe_peft" in card.text) == (kind == "adapter") and 'from_pretrained("me/mine")' in card.text


def test_saved_models_and_checkpoints_say_how_they_were_trained(base: Path, tmp_path: Path, tokenizer):
    model = make_model()
    model.config._name_or_path = model.peft_config["default"].base_model_name_or_path = str(base)
    trainer = make_trainer(
        tmp_path / "out", tokenizer, model=model, max_steps=2, save_strategy="steps", save_steps=1,
        hub_model_id="me/mine",
    )  # fmt: skip
    trainer.train()
    (tmp_path / "saved").mkdir()
    for written in UNREADABLE:
        (tmp_path / "saved" / "README.md").write_bytes(written)
        trainer.save_model(str(tmp_path / "saved"))
        assert (tmp_path / "saved" / "README.md.unreadable").read_bytes() == written
    for folder, steps in (("saved", 2), ("out/checkpoint-1", 1), ("out/checkpoint-2", 2)):
        text = (tmp_path / folder / "README.md").read_text()
        assert 'from_pretrained("path/to/this/folder")' in text
        assert f"- {steps} steps of 4 rows" in text and "import moe_peft" in text and UNFILLED not in text


def test_stock_trainers_tag_what_they_push(tmp_path: Path, tokenizer):
    model = make_model()
    trainer = SFTTrainer(
        model, arguments(tmp_path), train_dataset=Dataset.from_list(rows(8)), processing_class=tokenizer
    )
    assert {"moe_peft", "mixture-of-experts"} <= set(trainer.model.model_tags)
    assert trainer.model.unload().model_tags == ["trl", "sft"]
