"""Training all experts at once under forced routing gives the same as training each separately."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import cross_entropy, softplus
from transformers import TrainerState
from trl import SFTConfig, SFTTrainer

from moe_peft import MoELoraConfig, force_experts, lora_to_moe
from moe_peft.training.scoring import example_losses, make_scorable
from moe_peft.upit.buckets import expert_batches
from moe_peft.upit.post_train import post_train
from moe_peft.upit.router_init import OwnUpdates, RouterInitTrainer, init_router, routing_loss
from tests.helpers.models import assert_close_to_scale, tiny_llama
from tests.helpers.upit_case import rows

N, R = 4, 3
FFN = ["gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
    """Folders of N LoRA adapters with random weights."""
    folders = []
    for i in range(N):
        config = LoraConfig(r=R, lora_alpha=6, target_modules=FFN, init_lora_weights=False, task_type="CAUSAL_LM")
        folders.append(tmp_path_factory.mktemp(f"lora-{i}"))
        base = tiny_llama()
        torch.manual_seed(i)  # after `tiny_llama`, which seeds
        model = get_peft_model(base, config)
        model.save_pretrained(folders[-1])
    return folders


def moe(loras, mixing="output", **settings):
    base = tiny_llama()
    torch.manual_seed(9)
    return lora_to_moe(base, loras, task_type="CAUSAL_LM", mixing=mixing, **settings)


def arguments(folder, **own):
    defaults = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }
    return SFTConfig(output_dir=str(folder), **{**defaults, **own})


def make_trainer(loras, tokenizer, folder, mixing="output", objective="positive", **own):
    return RouterInitTrainer(
        model=moe(loras, mixing),
        args=arguments(folder, **own),
        train_dataset=Dataset.from_list(rows(12)),
        processing_class=tokenizer,
        objective=objective,
        alpha=0.3,
    )


def batch(trainer, experts):
    """A batch with padding, one example per given expert."""
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(len(experts))])
    assert (inputs["attention_mask"] == 0).any() and (inputs["labels"] == -100).any()
    return {**inputs, "expert": torch.tensor(experts)}


@pytest.mark.parametrize("mixing", ["output", "projection"])
def test_a_row_forced_to_an_expert_gives_the_logits_of_plain_lora(mixing, loras):
    ids = torch.randint(3, 128, (6, 11), generator=torch.Generator().manual_seed(0))
    experts = [2, 0, 3, 1, 0, 2]
    model = moe(loras, mixing).eval()
    with torch.no_grad(), force_experts(model, torch.tensor(experts)):
        forced = model(input_ids=ids).logits
    for row, expert in enumerate(experts):
        plain = PeftModel.from_pretrained(tiny_llama(), loras[expert]).eval()
        with torch.no_grad():
            assert_close_to_scale(forced[row], plain(input_ids=ids[row : row + 1]).logits[0])
    with torch.no_grad():  # and it is over after the block
        assert not torch.allclose(model(input_ids=ids).logits, forced, atol=1e-3)


def test_forcing_per_token_and_restoring(loras):
    model = moe(loras).eval()
    ids = torch.randint(3, 128, (2, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), force_experts(model, torch.tensor([1, 3])):
        by_row = model(input_ids=ids).logits
        with force_experts(model, torch.tensor([0])):
            pass
        torch.testing.assert_close(model(input_ids=ids).logits, by_row)
        with force_experts(model, torch.tensor([1] * 5 + [3] * 5)):
            torch.testing.assert_close(model(input_ids=ids).logits, by_row)
    with pytest.raises(ValueError, match="every layer has 0 to 3"), force_experts(model, torch.tensor([4])):
        pass
    with pytest.raises(ValueError, match="has no router"), force_experts(tiny_llama(), torch.tensor([0])):
        pass


def separate_losses(folder, router_rows, example, alpha):
    """One example through a model with one plain LoRA and its own routing vectors [L][d]: both losses and gradients."""
    model = PeftModel.from_pretrained(tiny_llama(), folder, is_trainable=True)
    seen: list[torch.Tensor] = []
    for layer in model.get_base_model().model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    vectors = [row.detach().clone().requires_grad_() for row in router_rows]
    ids, labels = torch.tensor([example["input_ids"]]), torch.tensor([example["labels"]])
    logits = model(input_ids=ids).logits
    lm = cross_entropy(logits[0, :-1], labels[0, 1:])
    aux = torch.stack([softplus(-(x[0] @ r)).mean() for x, r in zip(seen, vectors, strict=True)]).mean()
    (alpha * lm + (1 - alpha) * aux).backward()
    weights = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return lm.item(), aux.item(), weights, [r.grad for r in vectors]


@pytest.mark.parametrize("mixing", ["output", "projection"])
def test_joint_training_has_the_losses_and_gradients_of_separate_models(mixing, loras, tokenizer, tmp_path):
    trainer = make_trainer(loras, tokenizer, tmp_path, mixing)
    experts = [2, 0, 3, 2]  # expert 1 has no row
    inputs = batch(trainer, experts)
    model = trainer.model.train()
    with force_experts(model, inputs["expert"]):
        lm, aux, _ = trainer.row_losses(model, inputs)
        lm = lm / (inputs["labels"][:, 1:] != -100).sum(1)
        aux = aux / inputs["attention_mask"].sum(1)
        (0.3 * lm + 0.7 * aux).mean().backward()
    layers = [layer.mlp for layer in model.get_base_model().model.layers]
    expected = {}
    routers = [torch.zeros_like(layer.moe_lora_router["default"].weight) for layer in layers]
    for row, expert in enumerate(experts):
        vectors = [layer.moe_lora_router["default"].weight[expert] for layer in layers]
        one_lm, one_aux, weights, r_grads = separate_losses(
            loras[expert], vectors, trainer.train_dataset[row], alpha=0.3
        )
        assert lm[row].item() == pytest.approx(one_lm, rel=1e-5)
        assert aux[row].item() == pytest.approx(one_aux, rel=1e-5)
        for name, grad in weights.items():
            key = (expert, name.removeprefix("base_model.model."))
            expected[key] = expected.get(key, 0) + grad / len(experts)
        for total, grad in zip(routers, r_grads, strict=True):
            total[expert] += grad / len(experts)
    for i, layer in enumerate(layers):
        torch.testing.assert_close(layer.moe_lora_router["default"].weight.grad, routers[i], rtol=1e-4, atol=1e-8)
        A, B = layer.expert_parameters("default")
        for projection in FFN:
            for expert in range(N):
                name = f"model.layers.{i}.mlp.{projection}.lora_{{}}.default.weight"
                for kind, grad in (("A", A[projection].grad[expert]), ("B", B[projection].grad[expert].T)):
                    want = expected.get((expert, name.format(kind)), torch.zeros_like(grad))
                    torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-7)


def test_losses_are_means_over_the_tokens_of_an_experts_batch(loras, tokenizer, tmp_path):
    """Rows that fill up a step count neither in the loss nor in the log."""
    trainer = make_trainer(loras, tokenizer, tmp_path, per_device_train_batch_size=4)
    trainer.set_batches([[[1]], [], [[0, 3]], []])
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    assert inputs["expert"].tolist() == [0, 2, 2, 0]
    answers, tokens = (inputs["labels"][:, 1:] != -100).sum(1), inputs["attention_mask"].sum(1)
    assert len(set(answers.tolist())) > 2 and len(set(tokens.tolist())) > 2
    with torch.no_grad(), force_experts(trainer.model, inputs["expert"]):
        lm, aux, _ = trainer.row_losses(trainer.model, inputs)
        loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=torch.tensor(1))
    of_experts = [
        0.3 * lm[rows].sum() / answers[rows].sum() + 0.7 * aux[rows].sum() / tokens[rows].sum()
        for rows in ([0], [1, 2])
    ]
    torch.testing.assert_close(loss, sum(of_experts))
    for name, of_rows, counts in (("lm_loss", lm, answers), ("routing_loss", aux, tokens)):
        mean = of_rows[:3].sum() / counts[:3].sum()
        assert trainer._metrics["train"][name] == [pytest.approx(mean.item(), rel=1e-5)]


class SeparateTrainings:
    """
    Algorithm 3 as a plain loop: n models with one plain LoRA and one optimizer each. Router rows are parameters of
    their expert's optimizer; an objective that reads other experts' rows sends them its gradient.
    """

    def __init__(self, loras, router_rows, objective, alpha, lr, weight_decay, max_grad_norm):
        self.objective, self.alpha, self.max_grad_norm = objective, alpha, max_grad_norm
        self.models = [PeftModel.from_pretrained(tiny_llama(), folder, is_trainable=True) for folder in loras]
        self.rows = [[row.detach().clone().requires_grad_() for row in rows] for rows in router_rows]  # [n][L]
        self.trained = [
            [p for p in model.parameters() if p.requires_grad] + rows
            for model, rows in zip(self.models, self.rows, strict=True)
        ]
        self.optimizers = [torch.optim.AdamW(p, lr=lr, weight_decay=weight_decay) for p in self.trained]

    def loss(self, expert, batch):
        """Means over tokens of a batch of examples: L_lm over those of the answers, L_aux over all."""
        losses = [self.sums(expert, example) for example in batch]
        answers = sum(label != -100 for example in batch for label in example["labels"][1:])
        tokens = sum(len(example["input_ids"]) for example in batch)
        return sum(self.alpha * lm / answers + (1 - self.alpha) * aux / tokens for lm, aux in losses)

    def sums(self, expert, example):
        model, seen = self.models[expert], []
        handles = [
            layer.mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
            for layer in model.get_base_model().model.layers
        ]
        ids, labels = torch.tensor([example["input_ids"]]), torch.tensor([example["labels"]])
        lm = cross_entropy(model(input_ids=ids).logits[0, :-1], labels[0, 1:], reduction="sum")
        for handle in handles:
            handle.remove()
        per_layer = []
        for layer, x in enumerate(seen):
            logits = x @ torch.stack([rows[layer] for rows in self.rows]).T
            if self.objective == "positive":
                per_layer.append(softplus(-logits[:, expert]).sum())
            elif self.objective == "one_vs_rest":
                signs = torch.tensor([1.0 if i == expert else -1.0 for i in range(N)])
                per_layer.append(softplus(-signs * logits).mean(1).sum())
            else:
                per_layer.append(cross_entropy(logits, torch.full((len(x),), expert), reduction="sum"))
        return lm, torch.stack(per_layer).mean()

    def train(self, data, batches):
        for step in range(max(map(len, batches))):
            now = [expert for expert in range(N) if step < len(batches[expert])]
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            for expert in now:
                batch = batches[expert][step]
                self.loss(expert, [data[i] for i in batch]).backward()
            for expert in now:
                if self.max_grad_norm:
                    torch.nn.utils.clip_grad_norm_(self.trained[expert], self.max_grad_norm)
                self.optimizers[expert].step()


def assert_trained_apart(model, reference, tolerance):
    for i, layer in enumerate(layer.mlp for layer in model.get_base_model().model.layers):
        rows = torch.stack([rows[i] for rows in reference.rows])
        torch.testing.assert_close(layer.moe_lora_router["default"].weight, rows, **tolerance)
        A, B = layer.expert_parameters("default")
        for expert, plain in enumerate(reference.models):
            for projection in FFN:
                lora = getattr(plain.get_base_model().model.layers[i].mlp, projection)
                torch.testing.assert_close(A[projection][expert], lora.lora_A["default"].weight, **tolerance)
                torch.testing.assert_close(B[projection][expert].T, lora.lora_B["default"].weight, **tolerance)


@pytest.mark.parametrize("objective", ["positive", "one_vs_rest", "softmax"])
@pytest.mark.parametrize("mixing", ["output", "projection"])
@pytest.mark.parametrize(
    "own",
    [
        {"per_device_train_batch_size": 2, "max_grad_norm": None},
        {"per_device_train_batch_size": 2, "max_grad_norm": 0.5, "weight_decay": 0.1},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "max_grad_norm": 0.5},
    ],
    ids=["plain", "clipping and decay", "accumulation"],
)
def test_weights_after_stage_3_are_those_of_separate_trainings(mixing, objective, own, loras, tokenizer, tmp_path):
    """Unequal buckets (5, 5, 2 and 0 of 12 examples), several epochs with a rest, all experts' steps their own."""
    model = moe(loras, mixing)
    layers = [layer.mlp for layer in model.get_base_model().model.layers]
    routers = [[layer.moe_lora_router["default"].weight[i] for layer in layers] for i in range(N)]
    args = arguments(tmp_path, num_train_epochs=3, lr_scheduler_type="constant", adam_epsilon=1e-3, **own)
    reference = SeparateTrainings(
        loras, routers, objective, 0.3, args.learning_rate, args.weight_decay, own["max_grad_norm"]
    )
    for optimizer in reference.optimizers:
        optimizer.param_groups[0]["eps"] = 1e-3  # so that rounding is not blown up where gradients are tiny
    trainer = make_trainer(loras, tokenizer, tmp_path / "data")
    data = trainer.train_dataset.remove_columns("domain").add_column("domain", LABELS)
    result = init_router(model, data, args, tokenizer, objective=objective, alpha=0.3, **UNEVEN)
    assert [len(bucket) for bucket in result.buckets] == [5, 2, 5, 0]
    size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    batches = [expert_batches(bucket, 3, size, args.seed + i) for i, bucket in enumerate(result.buckets)]
    assert result.trained.metrics()["steps"] == max(map(len, batches))
    reference.train(data, batches)
    assert_trained_apart(model, reference, {"rtol": 1e-3, "atol": 2e-6})
    untrained = PeftModel.from_pretrained(tiny_llama(), loras[3]).state_dict()
    if objective == "positive":  # the expert without examples
        torch.testing.assert_close(reference.models[3].state_dict(), untrained, rtol=0, atol=0)


@pytest.mark.parametrize("mixing", ["output", "projection"])
def test_in_float64_the_weights_are_those_of_separate_trainings_still_closer(mixing, loras, tokenizer, tmp_path):
    """The base's norms and TRL's log-probabilities stay in float32."""
    model = moe(loras, mixing).double()
    layers = [layer.mlp for layer in model.get_base_model().model.layers]
    routers = [[layer.moe_lora_router["default"].weight[i] for layer in layers] for i in range(N)]
    own = {"per_device_train_batch_size": 2, "max_grad_norm": 0.5, "weight_decay": 0.1, "adam_epsilon": 1e-3}
    args = arguments(tmp_path, num_train_epochs=3, lr_scheduler_type="constant", **own)
    reference = SeparateTrainings(loras, routers, "softmax", 0.3, args.learning_rate, 0.1, 0.5)
    for plain, optimizer in zip(reference.models, reference.optimizers, strict=True):
        plain.double()
        optimizer.param_groups[0]["eps"] = 1e-3
    trainer = make_trainer(loras, tokenizer, tmp_path / "data")
    data = trainer.train_dataset.remove_columns("domain").add_column("domain", LABELS)
    result = init_router(model, data, args, tokenizer, objective="softmax", alpha=0.3, **UNEVEN)
    reference.train(data, [expert_batches(bucket, 3, 2, args.seed + i) for i, bucket in enumerate(result.buckets)])
    assert layers[0].moe_lora_router["default"].weight.dtype == torch.float64
    assert_trained_apart(model, reference, {"rtol": 1e-5, "atol": 2e-7})


LABELS = ["a", "b", "a", "b", "c", "a", "b", "a", "b", "c", "a", "b"]
UNEVEN = {"buckets": "label", "label_column": "domain", "expert_map": {"a": [2], "b": [0], "c": [1]}}  # 5, 2, 5 and 0


def uneven_rows():
    return Dataset.from_list([{**row, "domain": label} for row, label in zip(rows(12), LABELS, strict=True)])


@pytest.mark.slow
def test_routers_with_a_row_for_each_expert_train_alike(loras, tokenizer, tmp_path):
    """Under forced routing they have the same logits, so the same updates, clipping and decay included."""
    own = {"max_grad_norm": 0.5, "weight_decay": 0.1, "lr_scheduler_type": "constant", "num_train_epochs": 3}
    found = {}
    for router in ("linear", "sigmoid", "top_p", "threshold", "switch", "soft"):
        settings = {"router_type": router, **({"router_threshold": 0.3} if router in ("top_p", "threshold") else {})}
        model = moe(loras, "projection", **settings)
        before = {name: p.clone() for name, p in model.named_parameters() if "moe_lora_" in name}
        args = arguments(tmp_path / router, per_device_train_batch_size=2, **own)
        init_router(model, uneven_rows(), args, tokenizer, **UNEVEN)
        found[router] = {name: p.detach() for name, p in model.named_parameters() if "moe_lora_" in name}
        for name, value in found[router].items():
            assert torch.equal(value[3], before[name][3]) and not torch.equal(value[0], before[name][0])
    for router, values in found.items():
        for name, value in values.items():
            torch.testing.assert_close(value, found["linear"][name], rtol=1e-5, atol=1e-7, msg=f"{router} {name}")


def test_what_belongs_to_no_single_expert_trains_too(tokenizer, tmp_path):
    """A LoRA beside the experts is trained by all of them; experts that only one layer has are left alone."""
    torch.manual_seed(0)
    patterns = {"q_proj": 1, "layers.1.mlp": 6}
    config = MoELoraConfig(
        num_experts=4, r=2, target_modules=["mlp", "q_proj"], num_experts_pattern=patterns, init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = get_peft_model(tiny_llama(), config)
    before = {name: p.clone() for name, p in model.named_parameters()}
    args = arguments(tmp_path, per_device_train_batch_size=2, num_train_epochs=3, weight_decay=0.1)
    init_router(model, uneven_rows(), args, tokenizer, **UNEVEN)
    for name, value in model.named_parameters():
        if "q_proj.moe_lora" in name:
            assert not torch.equal(value, before[name]), name
        if "layers.1.mlp.moe_lora" in name:
            assert torch.equal(value[3:], before[name][3:]) and not torch.equal(value[:3], before[name][:3]), name


def test_every_experts_gradient_is_clipped_by_its_own_norm_and_the_rest_together():
    torch.manual_seed(0)
    patterns = {"q_proj": 1, "layers.1.mlp": 3}
    config = MoELoraConfig(num_experts=4, r=2, target_modules=["mlp", "q_proj"], num_experts_pattern=patterns)
    model = get_peft_model(tiny_llama(), config)
    size = torch.tensor([1e-4, 3.0, 10.0, 0.1])  # of the experts' gradients: the first is never clipped
    before = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.grad = torch.randn_like(p) * (1.0 if len(p) == 1 else size[: len(p)].view(-1, *[1] * (p.dim() - 1)))
            before[name] = p.grad.clone()
    update, state = OwnUpdates([9] * 4, 0.5), TrainerState(global_step=3)
    update.on_train_begin(None, state, None, model=model)
    update.on_pre_optimizer_step(None, state, None)
    after = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    shared = {name for name in after if "q_proj" in name}
    parts = [[(name, ...) for name in shared]]
    parts += [[(name, i) for name in after if name not in shared and len(after[name]) > i] for i in range(4)]
    for part in parts:
        norm = torch.cat([before[name][i].flatten() for name, i in part]).norm()
        factor = min(1.0, 0.5 / (norm.item() + 1e-6))
        for name, i in part:
            torch.testing.assert_close(after[name][i], before[name][i] * factor, rtol=1e-4, atol=1e-9)
    assert torch.equal(after[next(iter(set(after) - shared))][0], before[next(iter(set(after) - shared))][0])


def test_buckets_are_of_the_experts_that_all_layers_have_and_no_larger_than_asked_for(tokenizer, tmp_path):
    torch.manual_seed(0)
    config = MoELoraConfig(
        num_experts=4, r=2, num_experts_pattern={"layers.1.mlp": 6}, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = get_peft_model(tiny_llama(), config)
    args = arguments(tmp_path, num_train_epochs=1)
    result = init_router(model, Dataset.from_list(rows(12)), args, tokenizer, capacity=2)
    assert result.perplexity.shape == (12, 4) and [len(bucket) for bucket in result.buckets] == [2, 2, 2, 2]


@pytest.mark.parametrize("own, message", [
    ({"max_steps": 50}, "max_steps=50, num_train_epochs=3: set num_train_epochs to a whole number"),
    ({"num_train_epochs": 0.5}, "num_train_epochs=0.5: set num_train_epochs to a whole number"),
    ({"optim": "adafactor"}, "optim='adafactor': mixes the experts of a tensor; use adamw_torch"),
])  # fmt: skip
def test_settings_that_have_no_meaning_here_are_refused(own, message, loras, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=message):
        init_router(moe(loras), Dataset.from_list(rows(12)), arguments(tmp_path, **own), tokenizer)


def test_routers_without_parameters_are_refused(tokenizer, tmp_path):
    model = get_peft_model(tiny_llama(), MoELoraConfig(num_experts=4, router_type="locmoe", task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="these routers have no parameters to initialise"):
        init_router(model, Dataset.from_list(rows(12)), arguments(tmp_path), tokenizer)


def test_an_expert_moves_as_far_as_in_its_own_training(loras, tokenizer, tmp_path):
    """With more experts than one the steps are no more, only wider."""
    model = moe(loras)
    args = arguments(tmp_path, num_train_epochs=4, per_device_train_batch_size=3)
    result = init_router(model, Dataset.from_list(rows(12)), args, tokenizer, buckets="random")
    assert [len(bucket) for bucket in result.buckets] == [3, 3, 3, 3]
    assert result.trained.metrics()["steps"] == 4


@pytest.mark.parametrize("objective", ["positive", "one_vs_rest", "softmax"])
def test_routing_loss_is_that_of_a_plain_loop(objective):
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(3 * 5, N, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    experts = torch.tensor([3, 0, 2])
    reference = []
    for row in range(3):
        losses = []
        for layer in logits:
            for position in range(5):
                if mask[row, position]:
                    token, i = layer[row * 5 + position], int(experts[row])
                    p = torch.sigmoid(token)
                    if objective == "positive":
                        losses.append(-p[i].log())
                    elif objective == "one_vs_rest":
                        losses.append(-sum(p[j].log() if j == i else (1 - p[j]).log() for j in range(N)) / N)
                    else:
                        losses.append(-token.softmax(-1)[i].log())
        reference.append(sum(losses) / len(logits))
    reference = torch.stack(reference)
    loss = routing_loss(logits, experts, mask, objective)
    torch.testing.assert_close(loss, reference, rtol=1e-12, atol=0)
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(loss @ weights, logits), torch.autograd.grad(reference @ weights, logits), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def test_every_expert_is_scored_as_its_plain_lora_is(loras, tokenizer, tmp_path):
    trainer = make_trainer(loras, tokenizer, tmp_path)
    model = moe(loras, lora_dropout=0.5).train()
    make_scorable(model)
    losses, counts = example_losses(model, trainer.train_dataset, trainer.data_collator, N, rows=9)
    assert model.training and losses.shape == (12, N)  # without dropout, which is on again afterwards
    for expert in range(N):
        plain = PeftModel.from_pretrained(tiny_llama(), loras[expert]).eval()
        for i, example in enumerate(trainer.train_dataset):
            ids, labels = torch.tensor([example["input_ids"]]), torch.tensor([example["labels"]])
            with torch.no_grad():
                logits = plain(input_ids=ids).logits
            expected = cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
            assert losses[i, expert].item() == pytest.approx(expected.item(), rel=1e-5)
            assert counts[i] == (labels != -100).sum() < len(example["input_ids"])  # answers only


@pytest.mark.parametrize("buckets", ["perplexity", "relative", "label", "random"])
def test_init_router_trains_experts_and_routers(buckets, loras, tokenizer, tmp_path):
    model = moe(loras)
    before = copy.deepcopy(model.state_dict())
    data = Dataset.from_list(rows(12))
    args = arguments(tmp_path, num_train_epochs=3)
    result = init_router(model, data, args, tokenizer, buckets=buckets, label_column="domain")
    assert sorted(example for bucket in result.buckets for example in bucket) == list(range(12))
    if buckets in ("perplexity", "relative"):
        assert result.perplexity.shape == (12, N) and max(map(len, result.buckets)) == 3
    if buckets == "label":
        assert all(len({i % 3 for i in bucket}) == 1 for bucket in result.buckets)
    # Every expert takes the steps of a training of its own: three passes over its bucket, 4 rows a step.
    assert result.trained.metrics()["steps"] == 3 * max(-(-len(bucket) // 4) for bucket in result.buckets)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "moe_lora_" in name}
    history = result.trained.history
    assert {"lm_loss", "routing_loss", "loss"} <= history[0].keys()
    copy.deepcopy(model)  # nothing of the training stays on the model


def test_the_balancing_loss_is_there_again_afterwards(loras, tokenizer, tmp_path):
    """Neither the model's config nor the caller's arguments keep what this stage needs."""
    model = moe(loras, router_aux_loss_coef=0.05)
    args = arguments(tmp_path / "init", num_train_epochs=2)
    given = args.to_dict()
    init_router(model, Dataset.from_list(rows(8)), args, tokenizer)
    assert args.to_dict() == given
    assert model.config.output_router_logits and model.config.router_aux_loss_coef == 0.05
    after = arguments(tmp_path / "after", max_steps=2, logging_steps=1)
    trained = post_train(model, Dataset.from_list(rows(8)), after, tokenizer, output_dir=tmp_path / "adapter")
    assert all(record["aux_loss"] > 1 for record in trained.history)


def test_routing_vectors_only(loras, tokenizer, tmp_path):
    model = moe(loras)
    before = copy.deepcopy(model.state_dict())
    init_router(model, Dataset.from_list(rows(8)), arguments(tmp_path), tokenizer, train_experts=False)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "moe_lora_router" in name}


@pytest.mark.parametrize(
    "own",
    [
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ],
    ids=["accumulation", "checkpointing", "reentrant checkpointing"],
)
def test_same_training_however_it_is_done(own, loras, tokenizer, tmp_path):
    trained = {}
    for name, arguments_ in (("plain", {}), ("other", own)):
        model = moe(loras)
        # SGD, so that rounding is not blown up.
        args = arguments(tmp_path / name, optim="sgd", learning_rate=0.1, max_grad_norm=0.0, **arguments_)
        init_router(model, Dataset.from_list(rows(12)), args, tokenizer, objective="softmax")
        trained[name] = {key: value for key, value in model.state_dict().items() if "moe_lora_" in key}
    for key, value in trained["plain"].items():
        torch.testing.assert_close(trained["other"][key], value, rtol=1e-4, atol=1e-6)


def test_expert_losses_fall_on_their_buckets(loras, tokenizer, tmp_path):
    model = moe(loras)
    data = Dataset.from_list(rows(12))
    args = arguments(tmp_path, num_train_epochs=15, lr_scheduler_type="constant")
    result = init_router(model, data, args, tokenizer, objective="softmax")
    trainer = SFTTrainer(
        model=model, args=arguments(tmp_path / "after"), train_dataset=data, processing_class=tokenizer
    )
    losses, counts = example_losses(trainer.model, trainer.train_dataset, trainer.data_collator, N)
    after = (losses / counts.unsqueeze(1)).exp()
    for expert, bucket in enumerate(result.buckets):
        ratio = after[bucket, expert] / result.perplexity[bucket, expert]
        assert (ratio < 1).all() and ratio.mean() < 0.85


def test_an_unknown_objective_is_refused_before_any_training(loras, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="objective='bce': must be one of positive, one_vs_rest, softmax"):
        init_router(moe(loras), Dataset.from_list(rows(8)), arguments(tmp_path), tokenizer, objective="bce")


def test_packing_is_refused(loras, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="packing and padding_free must be off"):
        init_router(moe(loras), Dataset.from_list(rows(8)), arguments(tmp_path, packing=True), tokenizer)


@pytest.mark.parametrize("stage", ["init_router", "post_train"])
def test_a_disabled_adapter_is_named(stage, loras, tokenizer, tmp_path):
    model, data = moe(loras), Dataset.from_list(rows(4))
    model.base_model.disable_adapter_layers()
    with pytest.raises(ValueError, match="the model's adapter is disabled; call enable_adapter_layers"):
        if stage == "init_router":
            init_router(model, data, arguments(tmp_path), tokenizer)
        else:
            post_train(model, data, arguments(tmp_path), tokenizer, output_dir=tmp_path / "adapter")


# --- checkpoints of another training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("own, changed", [
    ({"learning_rate": 0.5}, "learning_rate 0.01 and not 0.5"),
    ({"objective": "softmax"}, "objective positive and not softmax"),
    ({"alpha": 0.1}, "alpha 0.5 and not 0.1"),
    ({"rows": 8}, "rows "),
    ({"offset": 3}, "data "),
    ({"train_experts": False}, "trained parameters "),
])  # fmt: skip
def test_another_training_does_not_go_on_from_the_checkpoints_there(own, changed, loras, tokenizer, tmp_path):
    def run(rate=1e-2, rows_=12, offset=0, **settings):
        args = arguments(tmp_path / "state", num_train_epochs=1, learning_rate=rate)
        return init_router(moe(loras), Dataset.from_list(rows(rows_, offset)), args, tokenizer, **settings)

    first = run()
    again = run()  # as it was: nothing is left to do
    assert again.trained.history == first.trained.history
    own = dict(own)
    settings = {"rate": own.pop("learning_rate", 1e-2), "rows_": own.pop("rows", 12), "offset": own.pop("offset", 0)}
    with pytest.raises(ValueError, match=f"state.: is of another training, with .*{changed}"):
        run(**settings, **own)


def test_stages_do_not_share_a_folder_and_foreign_checkpoints_stay(loras, tokenizer, tmp_path):
    model, data = moe(loras), Dataset.from_list(rows(12))
    args = arguments(tmp_path / "state", num_train_epochs=1)
    init_router(model, data, args, tokenizer)
    with pytest.raises(ValueError, match="is of another training, with "):
        post_train(model, data, args, tokenizer, output_dir=tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    (tmp_path / "mine" / "checkpoint-500").mkdir(parents=True)
    (tmp_path / "mine" / "checkpoint-500" / "model.safetensors").touch()
    mine = arguments(tmp_path / "mine", num_train_epochs=1)
    with pytest.raises(ValueError, match="has checkpoints of another training; choose another output_dir"):
        post_train(model, data, mine, tokenizer, output_dir=tmp_path / "adapter")
    assert (tmp_path / "mine" / "checkpoint-500" / "model.safetensors").is_file()
