"""Stage 3: each expert and its routing vectors are trained as in a training of their own, written as a plain loop."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy, softplus
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from trl import SFTConfig

from moe_peft.models.layer import router_parameters
from moe_peft.training.preparation import tokenized
from moe_peft.upit.lora_experts import set_routers
from moe_peft.upit.post_train import post_train
from moe_peft.upit.router_init import RouterInitTrainer, init_routers
from moe_peft.upit.routing_vectors import RoutingVectors, is_vector, record_scores
from tests.helpers.close import WIDTH, assert_near, near
from tests.helpers.models import tiny_llama, tiny_opt
from tests.helpers.upit_case import rows

N, ALPHA, EPOCHS = 4, 0.3, 3
FFN = ["gate_proj", "up_proj", "down_proj"]
LABELS = ["a", "b", "a", "b", "c", "a", "b", "a", "b", "c", "a", "b"]
UNEVEN = {"buckets": "label", "label_column": "domain", "expert_map": {"a": [2], "b": [0], "c": [1]}}  # 5, 2, 5 and 0


@pytest.fixture(scope="module", params=["lora", "ffn"])
def experts(request, tmp_path_factory):
    """Folders of N LoRA adapters, or of N dense models; without "lora", their `load` is that of the folder."""
    folder = tmp_path_factory.mktemp(request.param)
    for i in range(N):
        model = tiny_llama()
        torch.manual_seed(i)  # after `tiny_llama`, which seeds
        if request.param == "lora":
            config = LoraConfig(r=3, lora_alpha=6, target_modules=FFN, init_lora_weights=False, task_type="CAUSAL_LM")
            model = get_peft_model(model, config)
        else:
            for parameter in model.parameters():
                parameter.data += 0.02 * torch.randn_like(parameter)
        model.save_pretrained(folder / str(i))
    return [folder / str(i) for i in range(N)]


def is_lora(folder):
    return (Path(folder) / "adapter_config.json").exists()


def load(folder):
    return tiny_llama() if is_lora(folder) else AutoModelForCausalLM.from_pretrained(folder)


def arguments(folder, **own):
    defaults = {
        "per_device_train_batch_size": 4, "learning_rate": 1e-2, "bf16": False, "use_cpu": True, "report_to": "none",
        "gradient_checkpointing": False, "save_strategy": "no", "disable_tqdm": True, "seed": 0,
        "num_train_epochs": EPOCHS,
    }  # fmt: skip
    return SFTConfig(output_dir=str(folder / "state"), **{**defaults, **own})


def seeds(labels=None):
    data = rows(12)
    return Dataset.from_list([{**row, "domain": label} for row, label in zip(data, labels or LABELS, strict=True)])


def run(experts, tokenizer, folder, labels=None, alpha=ALPHA, args=None, **settings):
    own = {name: settings.pop(name) for name in list(settings) if hasattr(SFTConfig, name)}
    return init_routers(
        load, experts, seeds(labels), args or arguments(folder, **own), tokenizer, output_dir=folder, alpha=alpha,
        **settings,
    )  # fmt: skip


def weights(folder):
    (path,) = Path(folder).glob("*.safetensors")
    return load_file(path)


# --- the plain loop --------------------------------------------------------------------------------------------------


def plain_training(folder, seed, steps, args, rate):
    """
    Algorithm 1 for one expert: one model, one routing vector per layer, one optimizer.

    Args:
        steps: the micro-batches of each optimizer step.
        rate: of the vectors, constant; None: the experts'.

    Returns:
        the trained weights by name, and the vectors.
    """
    if is_lora(folder):
        model = PeftModel.from_pretrained(tiny_llama(), folder, is_trainable=True)
        trained = {name: p for name, p in model.named_parameters() if "lora_" in name}
        layers = model.get_base_model().model.layers
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
        trained = {name: p for name, p in model.named_parameters() if ".mlp." in name}
        layers = model.model.layers
    generator = torch.Generator().manual_seed(seed)
    vectors = [torch.empty(64).normal_(std=0.02, generator=generator).requires_grad_() for _ in layers]
    inputs: list[torch.Tensor] = []
    for layer in layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: inputs.append(args[0][0]))
    parameters = [*trained.values(), *vectors]
    groups = [{"params": list(trained.values())}, {"params": vectors, "lr": rate or args.learning_rate}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, weight_decay=args.weight_decay, eps=1e-3)

    def decay(step):
        return 1 - step / len(steps)

    own = [decay, (lambda step: 1.0) if rate else decay]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, own)
    for batches in steps:
        rows = [
            (batch["input_ids"][i][real], batch["labels"][i][real])
            for batch in batches
            for i, real in enumerate(batch["attention_mask"].bool())
        ]
        answers = sum(int((labels[1:] != -100).sum()) for _, labels in rows)
        tokens = sum(len(ids) for ids, _ in rows)
        optimizer.zero_grad()
        for ids, labels in rows:
            inputs.clear()
            logits = model(input_ids=ids.unsqueeze(0)).logits[0]
            lm = cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
            aux = sum(softplus(-(x @ r)).sum() for x, r in zip(inputs, vectors, strict=True)) / len(vectors)
            (ALPHA * lm / answers + (1 - ALPHA) * aux / tokens).backward()
        torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
        optimizer.step()
        schedule.step()
    return {name.replace(".default", ""): p.detach() for name, p in trained.items()}, vectors


@pytest.fixture
def steps(monkeypatch):
    """The micro-batches of every optimizer step, by the expert's name, as the trainer takes them."""
    seen: dict[str, list] = {}
    original = RouterInitTrainer.get_batch_samples

    def recording(self, *args):
        batches, count = original(self, *args)
        if batches:
            seen.setdefault(Path(self.args.output_dir).name, []).append(batches)
        return batches, count

    monkeypatch.setattr(RouterInitTrainer, "get_batch_samples", recording)
    return seen


@pytest.mark.parametrize(
    ("experts", "rate", "own"),
    [
        ("lora", None, {"per_device_train_batch_size": 2}),
        ("ffn", 0.05, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}),
    ],
    indirect=["experts"],
)
def test_each_expert_is_trained_as_by_itself(rate, own, experts, steps, tokenizer, tmp_path):
    """Buckets of 5, 2, 5 and 0 examples; each with its own updates, schedule, clipping and weight decay."""
    args = arguments(
        tmp_path, weight_decay=0.1, max_grad_norm=0.5, adam_epsilon=1e-3, lr_scheduler_type="linear", **own
    )
    routed = run(experts, tokenizer, tmp_path, args=args, router_learning_rate=rate, **UNEVEN)
    assert [len(bucket) for bucket in routed.buckets] == [5, 2, 5, 0]
    size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert [len(steps.get(f"expert-{i}", [])) for i in range(N)] == [
        -(-count // size) * EPOCHS for count in (5, 2, 5, 0)
    ]
    for i, (source, target) in enumerate(zip(experts, routed.experts, strict=True)):
        before, after = weights(source), weights(target)
        assert before.keys() == after.keys()
        if i == 3:  # no examples
            assert all(torch.equal(before[name], after[name]) for name in before)
            continue
        wanted, vectors = plain_training(source, args.seed + i, steps[f"expert-{i}"], args, rate)
        generator = torch.Generator().manual_seed(args.seed + i)
        start = [torch.empty(64).normal_(std=0.02, generator=generator) for _ in vectors]
        shares = [float((r.detach() - s).norm() / s.norm()) for r, s in zip(vectors, start, strict=True)]
        assert routed.moved[i] == near(sum(shares) / len(shares))
        assert routed.steps[i] == len(steps[f"expert-{i}"])
        for name in after:
            if name in wanted:
                assert_near(after[name], wanted[name], name, terms=WIDTH * routed.steps[i])
                assert not torch.equal(after[name], before[name])
            else:
                assert torch.equal(after[name], before[name]), name
        for router, vector in zip(routed.routers, vectors, strict=True):
            assert_near(router[i], vector, terms=WIDTH * routed.steps[i])


@pytest.mark.slow
def test_every_expert_is_scored_by_itself(experts, tokenizer, tmp_path):
    routed = run(experts, tokenizer, tmp_path, num_train_epochs=1, train_experts=False)
    assert routed.perplexity.shape == (12, N) and [len(bucket) for bucket in routed.buckets] == [3, 3, 3, 3]
    data, _ = tokenized(seeds(), tokenizer, arguments(tmp_path))
    for i, folder in enumerate(experts):
        model = PeftModel.from_pretrained(tiny_llama(), folder) if is_lora(folder) else load(folder)
        for example in (0, 7):
            ids, labels = (torch.tensor([data[example][name]]) for name in ("input_ids", "labels"))
            with torch.no_grad():
                loss = cross_entropy(model.eval()(input_ids=ids).logits[0, :-1], labels[0, 1:])
            assert routed.perplexity[example, i].item() == near(loss.exp().item())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "own"),
    [
        ("lora", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
        ("ffn", {"gradient_checkpointing": True}),
        ("lora", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    ],
    ids=["accumulation", "checkpointing", "reentrant checkpointing"],
    indirect=["experts"],
)
def test_same_training_however_it_is_done(own, experts, tokenizer, tmp_path):
    trained = {}
    for name, more in (("plain", {}), ("other", own)):
        # SGD, so that rounding is not blown up.
        args = arguments(tmp_path / name, optim="sgd", learning_rate=0.1, max_grad_norm=0.0, **more)
        trained[name] = run(experts[:2], tokenizer, tmp_path / name, args=args, buckets="random")
    for one, other in zip(trained["plain"].routers, trained["other"].routers, strict=True):
        assert_near(one, other)
    for one, other in zip(trained["plain"].experts, trained["other"].experts, strict=True):
        after = weights(other)
        for name, value in weights(one).items():
            assert_near(after[name], value)


@pytest.mark.slow
def test_routing_vectors_only(experts, tokenizer, tmp_path):
    routed = run(experts, tokenizer, tmp_path, buckets="random", train_experts=False)
    for source, target in zip(experts, routed.experts, strict=True):
        before, after = weights(source), weights(target)
        assert all(torch.equal(before[name], after[name]) for name in before | after)
    start = RoutingVectors([layer.mlp for layer in tiny_llama().model.layers], seed=1).vectors
    assert all(not torch.equal(router[1], vector) for router, vector in zip(routed.routers, start, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "train_experts"), [("lora", True), ("ffn", False)], indirect=["experts"])
def test_the_rate_of_the_vectors_is_constant_whatever_the_experts(
    train_experts, experts, tokenizer, tmp_path, monkeypatch
):
    rates, step = [], RouterInitTrainer.training_step

    def noted(self, *args, **kwargs):
        vectors = {id(p) for name, p in self.model.named_parameters() if is_vector(name)}
        groups = self.optimizer.param_groups
        assert all(group["params"] for group in groups)  # DeepSpeed drops empty ones, and the others would move
        rates.append([group["lr"] for group in groups if vectors & {id(p) for p in group["params"]}])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(RouterInitTrainer, "training_step", noted)
    settings = {"lr_scheduler_type": "linear", "warmup_steps": 1, "train_experts": train_experts}
    run(experts, tokenizer, tmp_path, buckets="random", router_learning_rate=0.02, **settings)
    assert len(rates) > 4 and all(rate == [0.02] for rate in rates)


def test_linears_that_read_flattened_tokens(tokenizer, tmp_path):
    """OPT's, in batches of several rows."""

    def opt(folder=None):
        model = tiny_opt()
        for layer in model.model.decoder.layers:
            layer.dropout = 0.0
        return model

    loras = [tmp_path / str(i) for i in range(2)]
    for i, folder in enumerate(loras):
        torch.manual_seed(i)
        config = LoraConfig(r=3, target_modules=["fc1", "fc2"], init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(opt(), config).save_pretrained(folder)
    losses = {}
    for size, accumulation in ((4, 1), (1, 4)):
        folder = tmp_path / f"of {size}"
        args = arguments(
            folder, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, logging_steps=1
        )
        routed = init_routers(opt, loras, seeds(), args, tokenizer, output_dir=folder, buckets="random")
        losses[size] = routed.trained[0].history[0]["routing_loss"]
    assert losses[4] == near(losses[1])


@pytest.mark.parametrize("experts", ["lora"], indirect=True)
def test_vectors_learn_the_inputs_of_their_expert(experts, tokenizer, tmp_path):
    """The loss is near log 2 at the start, and falls."""
    history = run(experts, tokenizer, tmp_path, alpha=0.0, num_train_epochs=12, logging_steps=1).trained[0].history
    assert history[0]["routing_loss"] == pytest.approx(0.69, abs=0.15)
    assert history[0]["routing_loss"] == pytest.approx(history[0]["loss"], rel=1e-3)  # alpha 0: nothing but it; rounded
    assert history[-2]["routing_loss"] < history[0]["routing_loss"] - 0.1 and "lm_loss" in history[0]


def test_ridge_gates_tell_the_buckets_apart(experts, tokenizer, tmp_path):
    """The regression from the inputs of each FFN, of the base or of the mean of the models, to the bucket."""
    own = {"buckets": "label", "label_column": "domain", "expert_map": {"a": [2], "b": [0, 3], "c": [1]}}
    routed = run(experts, tokenizer, tmp_path, gates="ridge", **own)
    assert routed.experts == experts and routed.trained == [] and not (tmp_path / "experts").exists()
    model, inputs = load(experts[0]), {0: [], 1: []}
    if not is_lora(experts[0]):
        mean = [torch.stack(values).mean(0) for values in zip(*(load(e).parameters() for e in experts), strict=True)]
        for parameter, value in zip(model.parameters(), mean, strict=True):
            parameter.data = value
    for i, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda module, args, i=i: inputs[i].append(args[0][0].double()))
    data, _ = tokenized(seeds(), tokenizer, arguments(tmp_path))
    targets = []
    for expert, bucket in enumerate(routed.buckets):
        for example in bucket:
            ids = torch.tensor([data[example]["input_ids"]])
            with torch.no_grad():
                model(input_ids=ids)
            targets += [expert] * ids.shape[1]
    y = torch.nn.functional.one_hot(torch.tensor(targets), N).double()
    for i, router in enumerate(routed.routers):
        x = torch.cat(inputs[i])
        w = torch.linalg.solve(x.T @ x + 1e-2 * torch.eye(64).double(), x.T @ y)
        assert_near(router, (w / w.norm(dim=0)).T / 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["ffn"], indirect=True)
def test_one_model_is_in_memory(experts, tokenizer, tmp_path):
    alive = []

    def counted(folder):
        gc.collect()
        alive.append(sum(isinstance(x, LlamaForCausalLM) for x in gc.get_objects()))
        return load(folder)

    gc.collect()
    before = sum(isinstance(x, LlamaForCausalLM) for x in gc.get_objects())
    args = arguments(tmp_path, num_train_epochs=1)
    init_routers(counted, experts[:3], seeds(), args, tokenizer, output_dir=tmp_path)
    assert set(alive) == {before} and len(alive) == (4 if is_lora(experts[0]) else 6)  # LoRAs are scored on one base


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["lora"], indirect=True)
def test_what_was_done_is_not_done_again(experts, tokenizer, tmp_path, monkeypatch):
    first = run(experts[:2], tokenizer, tmp_path)
    monkeypatch.setattr("moe_peft.upit.router_init.example_losses", None)
    monkeypatch.setattr(RouterInitTrainer, "compute_loss", None)
    again = run(experts[:2], tokenizer, tmp_path)
    assert again.buckets == first.buckets and [t.history for t in again.trained] == [t.history for t in first.trained]
    assert all(torch.equal(a, b) for a, b in zip(first.routers, again.routers, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["lora"], indirect=True)
def test_the_mixture_has_the_vectors_as_its_routers(experts, tokenizer, tmp_path):
    from moe_peft import lora_to_moe

    args = arguments(tmp_path, num_train_epochs=2)
    before = args.to_dict()
    routed = run(experts, tokenizer, tmp_path, args=args, buckets="random")
    assert args.to_dict() == before
    moe = lora_to_moe(tiny_llama(), routed.experts, task_type="CAUSAL_LM", router_aux_loss_coef=0.05)
    set_routers(moe, routed.routers)
    for parameter, weight in zip(router_parameters(moe).values(), routed.routers, strict=True):
        assert torch.equal(parameter, weight) and weight.shape == (N, 64)
    own = arguments(tmp_path / "after", max_steps=2, logging_steps=1)
    trained = post_train(moe, Dataset.from_list(rows(8)), own, tokenizer, output_dir=tmp_path / "adapter")
    assert all(record["aux_loss"] > 1 for record in trained.history)


def test_vectors_of_half_precision_are_multiplied_in_float32():
    model, inputs = tiny_llama(hidden=16).bfloat16(), []
    names = [f"model.layers.{i}.mlp" for i in range(2)]
    model.add_module("routing_vectors", RoutingVectors([model.get_submodule(name) for name in names], seed=0))
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: inputs.append(args[0]))
    model.routing_vectors.bfloat16()
    scores = record_scores(model, names)
    model(torch.arange(3, 11).view(2, 4))
    for score, x, vector in zip(scores, inputs, model.routing_vectors.vectors, strict=True):
        assert score.dtype == torch.float32 and x.dtype == torch.bfloat16
        assert_near(score, x.float() @ vector.float())


def test_linears_beside_the_ffns_have_vectors_too(tokenizer, tmp_path):
    """Given LoRAs may adapt attention; one that lacks a module has a vector for it all the same."""
    folders = []
    for i, targets in enumerate((["up_proj", "q_proj"], ["up_proj"])):
        config = LoraConfig(r=2 + i, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(tiny_llama(), config).save_pretrained(tmp_path / str(i))
        folders.append(tmp_path / str(i))
    routed = run(folders, tokenizer, tmp_path / "out", buckets="random", num_train_epochs=1)
    assert [tuple(router.shape) for router in routed.routers] == [(2, 64)] * 4  # q_proj and mlp of two layers
    assert len(weights(routed.experts[1])) == 4 and len(weights(routed.experts[0])) == 8


def test_experts_that_were_trained_again_are_scored_again(experts, tokenizer, tmp_path):
    folders = [tmp_path / str(i) for i in range(2)]
    for source, folder in zip(experts, folders, strict=False):
        shutil.copytree(source, folder)
    settings = {"gates": "prompts", "args": arguments(tmp_path)}
    before = run(folders, tokenizer, tmp_path / "out", **settings).perplexity
    shutil.copytree(experts[2], folders[0], dirs_exist_ok=True)
    after = run(folders, tokenizer, tmp_path / "out", **settings).perplexity
    assert not torch.equal(before[:, 0], after[:, 0]) and torch.equal(before[:, 1], after[:, 1])
