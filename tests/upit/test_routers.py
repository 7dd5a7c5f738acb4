"""UpIT for whole FFNs with routers instead of plain gates: what trains is what the same calls train by hand."""

from __future__ import annotations

import copy
import json
import logging
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from moe_peft import MoESFTConfig, fold_routers, init_attention_routers, replace_routers
from moe_peft.models.gates import CONFIG_FIELD
from moe_peft.models.routed_gate import RoutedGate
from moe_peft.native import UpcycleConfig, upcycle
from moe_peft.native.base import Base
from moe_peft.routing.routers import RouterSettings
from moe_peft.training.preparation import calibration_batches, tokenized
from moe_peft.upit import UpIT, post_train, recipe_from_dict
from moe_peft.utils.messages import InputError
from tests.helpers.close import assert_near, near
from tests.helpers.upit_case import chats, make_ffn_case, run, run_in_process, without_paths

pytestmark = pytest.mark.slow

ATTENTION = {"type": "attention", "num_heads": 2}


def settings_with(router, folder, tokenizer, **own):
    case = make_ffn_case(folder, tokenizer, method="upcycle_pt", num_experts=4, num_train_epochs=1)
    for name in ("prepare", "router_init"):
        del case[name]
    moe = {"top_k": 2, "init": "drop", **own}
    return {**case, "moe": moe, "post_train": {"router": router, "sft": {"router_z_loss_coef": 0.001}}}


class Sharded(MoESFTConfig):
    """As with DeepSpeed, which this environment lacks; a run's name ends with ZeRO's stage."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.deepspeed_plugin = SimpleNamespace(zero_stage=int(self.run_name[-1]))


def test_gates_that_are_replaced_are_not_sharded(tmp_path, tokenizer, monkeypatch):
    pipeline = UpIT(
        recipe_from_dict({**settings_with(ATTENTION, tmp_path, tokenizer), "output_dir": str(tmp_path / "out")})
    )
    stage = pipeline.stages[0]
    monkeypatch.setattr(type(stage), "config", Sharded)
    assert stage.arguments(run_name="stage 2").run_name == "stage 2"
    with pytest.raises(InputError, match=r"post_train\.router=.*: ZeRO-3 shards the gates; use FSDP2 or ZeRO-2"):
        stage.arguments(run_name="stage 3")


@pytest.mark.parametrize("router", [ATTENTION, {"type": "attention"}])
def test_attention_routers_are_trained_and_folded_as_by_hand(router, tmp_path, tokenizer):
    settings = settings_with(router, tmp_path, tokenizer, router_init="attention")
    pipeline = run(settings, tmp_path)
    base, stage = settings["model"]["name_or_path"], pipeline.stages[0]
    assert json.loads((tmp_path / "out/post_train/stage.json").read_text())["steps"] == 12

    upcycle(base, tmp_path / "copies", UpcycleConfig(num_experts=4, top_k=2, init="drop", seed=stage.seed))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "copies")
    model.config.router_aux_loss_coef = 0.01
    data, tokenizer = pipeline.context.train_data, AutoTokenizer.from_pretrained(base)
    batches = calibration_batches(data, tokenizer, seed=stage.seed)
    replace_routers(model, RouterSettings(**router))
    init_attention_routers(model, batches, dense=AutoModelForCausalLM.from_pretrained(base))
    before = [gate.moe_router.mean_query.clone() for gate in gates(model)]
    args = stage.arguments(output_dir=str(tmp_path / "by hand"), num_train_epochs=1)
    post_train(model, data, args, tokenizer, output_dir=tmp_path / "mine")
    assert all(not torch.equal(old, gate.moe_router.mean_query) for old, gate in zip(before, gates(model), strict=True))
    fold_routers(model)

    result, info = AutoModelForCausalLM.from_pretrained(pipeline.result, output_loading_info=True)
    assert not any(info.values())
    wanted = model.state_dict()
    assert result.state_dict().keys() == wanted.keys() and not any("moe_router" in name for name in wanted)
    for name, tensor in result.state_dict().items():
        assert_near(tensor, wanted[name], name)


def gates(model):
    return [module for module in model.modules() if isinstance(module, RoutedGate)]


@pytest.mark.parametrize("router", [{"type": "mlp"}, {"type": "attention", "num_heads": 2, "mixture": "max"}])
def test_routers_that_do_not_fold_stay(router, tmp_path, tokenizer, caplog):
    caplog.set_level(logging.INFO)
    pipeline = run(settings_with(router, tmp_path, tokenizer), tmp_path)
    assert "the result keeps its routers" in caplog.text
    model = Base(str(pipeline.result)).load().eval()
    assert [gate.moe_router.settings.type for gate in gates(model)] == [router["type"]] * 2
    data, collator = tokenized(
        pipeline.context.eval_data, pipeline.context.base.tokenizer, pipeline.stages[0].arguments()
    )
    losses, counts = Counter(), Counter()  # the evaluation is of the model with its routers
    for row in data:
        batch = collator([row])
        with torch.no_grad():
            logits, labels = model(input_ids=batch["input_ids"]).logits[0, :-1], batch["labels"][0, 1:]
        losses[row["domain"]] += cross_entropy(logits, labels, reduction="sum").item()
        counts[row["domain"]] += int((labels != -100).sum())
    recorded = pipeline.records["evaluate"]["metrics"]["loss"]["adapted"]
    for domain, loss in losses.items():
        assert recorded[domain] == near(loss / counts[domain])


def test_locmoe_folds(tmp_path, tokenizer):
    result = run(settings_with({"type": "locmoe"}, tmp_path, tokenizer), tmp_path).result
    config = json.loads((result / "config.json").read_text())
    assert config["num_experts_per_tok"] == 2 and config["output_router_logits"] is False
    assert CONFIG_FIELD not in config
    assert not any("moe_router" in name for name in load_file(result / "model.safetensors"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("undisturbed")
    settings = settings_with(ATTENTION, folder, tokenizer, router_init="attention")
    assert run_in_process(settings, folder) == 0
    return settings, without_paths(folder / "out")


@pytest.mark.parametrize(("point", "n"), [("before a checkpoint is marked", 2)])
def test_killed_run_goes_on_to_the_same_bytes(point, n, undisturbed, tmp_path):
    settings, files = undisturbed
    assert run_in_process(settings, tmp_path, (point, n)) == -9
    assert run_in_process(settings, tmp_path) == 0
    assert without_paths(tmp_path / "out") == files


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"post_train": {"router": {"type": "x"}}}, "post_train.router: "),
        ({"post_train": {"router": {"kind": "mlp"}}}, "post_train.router.kind: unknown key"),
        ({"post_train": {"router": {"attention_size": 8}}}, "post_train.router.attention_size: it follows from"),
        ({"post_train": {"router": {"type": "mlp", "num_heads": 4}}}, "num_heads=4: router='mlp' has no use for it"),
        ({"post_train": {"router": {"type": "attention", "num_heads": 0}}}, "router_num_heads=0"),
        ({"post_train": {"router": {"type": "attention", "num_heads": "x"}}}, "post_train.router.num_heads='x'"),
        (
            {"post_train": {"router": {"type": "hash"}, "sft": {"router_z_loss_coef": 0.1}}},
            "router_z_loss_coef=0.1: must",
        ),
        ({"method": "self_moe", "post_train": {"router": {"type": "hash"}}}, "these routers have no parameters; use"),
        (
            {"post_train": {"router": {"type": "attention", "num_heads": 3}}},
            "router_num_heads=3: must divide the base's",
        ),
        ({"method": "upit"}, "stage 3 makes the gates"),
        (
            {"mode": "lora", "method": "loramoe_pt", "moe": {}},
            "must be left out in the mode 'lora': ",
        ),
    ],
)
def test_routers_that_cannot_be_are_refused(own, message, tmp_path, tokenizer):
    settings = settings_with(ATTENTION, tmp_path, tokenizer)
    with pytest.raises(ValueError) as error:
        UpIT(recipe_from_dict({**settings, "output_dir": str(tmp_path / "out"), **own})).check()
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("heads", "seen"), [(None, 4), (2, 2)])
def test_linear_routers_are_those_of_as_many_attention_heads_as_asked(heads, seen, tmp_path, tokenizer, monkeypatch):
    """`moe.router_num_heads` is read where the routers have no such setting of their own."""
    asked = []

    def asked_and_stopped(model, attentions, batches, sizes):
        asked.extend(sizes)
        raise KeyboardInterrupt

    monkeypatch.setattr("moe_peft.models.attention_init._weights", asked_and_stopped)
    own = {} if heads is None else {"router_num_heads": heads}
    settings = settings_with({"type": "switch"}, tmp_path, tokenizer, router_init="attention", **own)
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path)
    assert asked == [(seen, 4)] * 2


@pytest.mark.parametrize(("method", "router"), [("upcycle_pt", ATTENTION), ("upcycle_sft", ATTENTION)])
def test_calibration_leaves_out_tokens_that_the_base_has_not_learned(method, router, tmp_path, tokenizer):
    """A template may bring some; a model that stage 1 trained knows them."""
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<new>", "<end>"])
    other.chat_template = "{% for m in messages %}<new> {{ m['content'] }} <end> {% endfor %}"
    other.save_pretrained(tmp_path / "other")
    settings = chats(settings_with(router, tmp_path, tokenizer, router_init="attention"))
    settings["moe"]["init"] = "copy"
    settings["sft"] = {**settings["sft"], "chat_template_path": str(tmp_path / "other")}
    pipeline = run({**settings, "method": method}, tmp_path)
    stage = pipeline.stages[-2]
    batches = stage.kind.calibration(stage.given.experts, stage.context.train_data, stage.arguments(), stage.seed)
    ids = torch.cat([batch["input_ids"].flatten() for batch in batches])
    mask = torch.cat([batch["attention_mask"].flatten() for batch in batches])
    vocab_size = len(tokenizer)
    assert ids.max() == (vocab_size + 1 if method == "upcycle_sft" else vocab_size - 1)
    assert not mask.bool().all() or method == "upcycle_sft"
    weights = load_file(pipeline.result / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize("prepared", [False, True])
def test_the_dense_model_is_the_one_that_is_upcycled(prepared, tmp_path, tokenizer, monkeypatch):
    read = []

    def init(model, batches, num_heads, dense):
        read.append(dense.model.layers[0].self_attn.q_proj.weight.detach().cpu())
        init_attention_routers(model, batches, num_heads=num_heads, dense=dense)

    monkeypatch.setattr("moe_peft.upit.dense_experts.init_attention_routers", init)
    settings = settings_with(ATTENTION, tmp_path, tokenizer, router_init="attention", init="copy")
    pipeline = run({**settings, "method": "upcycle_sft" if prepared else "upcycle_pt"}, tmp_path)
    [trained] = pipeline.stages[-2].given.experts[:1] or [settings["model"]["name_or_path"]]
    dense = AutoModelForCausalLM.from_pretrained(trained)
    assert torch.equal(read[0], dense.model.layers[0].self_attn.q_proj.weight)
    base = AutoModelForCausalLM.from_pretrained(settings["model"]["name_or_path"])
    assert torch.equal(read[0], base.model.layers[0].self_attn.q_proj.weight) is not prepared


@pytest.mark.parametrize("kind", ["soft", "switch", "top_p"])
def test_labels_of_one_expert_train_and_are_evaluated_under_their_mask(kind, tmp_path, tokenizer):
    settings = settings_with({"type": kind}, tmp_path, tokenizer, init="copy")
    own = {"expert_map": {"a": [0], "b": [1], "c": [2]}, "router_label_mask": True, "router_label_loss_coef": 0.0}
    settings["post_train"]["sft"] = own
    shares = run(settings, tmp_path).records["evaluate"]["metrics"]["shares"]
    for label, expert in (("a", 0), ("b", 1), ("c", 2)):
        share = torch.tensor(shares[label])  # [layers, experts]
        assert torch.equal(share, torch.eye(4)[expert].expand_as(share)), (label, share)


def test_calibration_reads_rows_without_an_answer_in_reach(tmp_path, tokenizer):
    """What has a loss in training does not matter to it."""
    template = "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    template += "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %} {% endfor %}"
    (tmp_path / "own.jinja").write_text(template)
    long = [{"role": "user", "content": "w5 " * 30}, {"role": "assistant", "content": "w6 w7"}]
    own = {"assistant_only_loss": True, "chat_template_path": str(tmp_path / "own.jinja"), "bf16": False}
    args = SFTConfig(str(tmp_path / "state"), use_cpu=True, report_to="none", max_length=64, **own)
    data = Dataset.from_list([{"messages": long}] * 3)
    [batch] = calibration_batches(data, tokenizer, max_length=16, args=args)
    assert batch["input_ids"].shape == (3, 16) and args.assistant_only_loss


@pytest.mark.parametrize("router", [ATTENTION, {}])
def test_calibration_goes_through_the_recipes_chat_template(router, tmp_path, tokenizer):
    """The tokenizer has none, and stage 1 comes first."""
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}w3 {{ m['content'] }} {% endfor %}")
    settings = chats(settings_with(router, tmp_path, tokenizer, router_init="attention"))
    settings["moe"]["init"] = "copy"
    settings["sft"] = {**settings["sft"], "chat_template_path": str(template), "packing": True, "max_length": 64}
    pipeline = run({**settings, "method": "upcycle_sft"}, tmp_path)
    base = AutoTokenizer.from_pretrained(settings["model"]["name_or_path"])
    assert base.chat_template is None and pipeline.result.is_dir()
    base.chat_template = template.read_text()
    args = pipeline.stages[-2].arguments()
    data = pipeline.context.train_data
    batches = calibration_batches(
        data, pipeline.context.base.tokenizer, max_examples=6, batch_size=2, seed=3, args=args
    )
    wanted = calibration_batches(data, base, max_examples=6, batch_size=2, seed=3)
    assert len(batches) == len(wanted) == 3 and args.packing and args.max_length == 64
    for one, other in zip(batches, wanted, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert torch.equal(one["attention_mask"], other["attention_mask"])
