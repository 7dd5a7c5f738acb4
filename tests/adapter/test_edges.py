"""
Numbers at the edge: batches without tokens, padding alone, values near the limits of a dtype. Outputs, losses and
gradients are those of plain loops in float64, and what has no answer is refused on one line.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from moe_peft import MoELoraConfig, allow_experts, force_experts, pin_dispatch
from moe_peft.adapter.layers import MoELoraLayer
from moe_peft.adapter.router_recorder import Collection, state, steering_block
from moe_peft.analysis import LoadCallback, record_routing
from moe_peft.analysis.recorder import RoutingStatistics
from moe_peft.native import export_adapter
from moe_peft.native.expert_init import FFN, INITIALISATIONS, ExpertInit, generator_for
from moe_peft.native.safetensors_io import ShardedWriter
from moe_peft.routing.gates import (
    AllowedExperts,
    ForcedExperts,
    sigmoid_gates,
    switch_gates,
    threshold_gates,
    top_k_gates,
    top_p_gates,
)
from moe_peft.routing.losses import balancing_loss, label_losses, z_losses
from moe_peft.training.scoring import example_answers, example_losses, mean_loss
from moe_peft.training.trainers import MoESFTConfig, MoESFTTrainer
from moe_peft.upit.buckets import perplexity_buckets
from moe_peft.upit.expansion import dare_merge, expand
from moe_peft.utils.expert_likeness import likeness, similarities, update_gram
from tests.helpers.balance import layer_balancing_loss
from tests.helpers.close import assert_near, near
from tests.helpers.expert_layers import D, ffn_layer, linear_layer, tensors
from tests.helpers.models import tiny_llama
from tests.helpers.native_case import adapter as saved_adapter
from tests.helpers.native_case import dense_model, saved
from tests.helpers.reference import assert_same, chosen_experts, reference, run
from tests.helpers.routed_models import NATIVE
from tests.helpers.router_kinds import ROUTER_KINDS, routed_layer
from tests.helpers.trainers import arguments

METHODS = ["auto", "dense", "blocks", "gather", "dense-blocks", "sorted", "dense-sorted"]
BOTTLENECK = {"expert_type": "bottleneck", "bottleneck_size": 8}
INF = math.inf
LARGEST = torch.finfo(torch.float16).max
IDS = torch.randint(3, 128, (2, 7), generator=torch.Generator().manual_seed(0))


# --- no tokens --------------------------------------------------------------------------------------------------------


def steered(layer: MoELoraLayer, kind: str, rows: int) -> AbstractContextManager:
    """Steer a batch of `rows` rows (which may be none) through the layer's 4 experts."""
    if kind == "free":
        return nullcontext()
    forced = kind == "forced"
    steering = ForcedExperts(torch.zeros(rows).long()) if forced else AllowedExperts(torch.ones(rows, 4).bool())
    return steering_block({layer: steering})


def check_without_tokens(layer: MoELoraLayer, x: torch.Tensor, forward: Callable | None = None) -> None:
    """The output is the base's, and every parameter gets a zero gradient, not none; routing is recorded."""
    layer.zero_grad()
    collection = Collection(layer, attached=True, token_ids=torch.zeros(x.shape[:-1], dtype=torch.long))
    state.current.collection = collection if forward is None else None
    try:
        output = layer(x) if forward is None else forward(x)
    finally:
        state.current.collection = None
    base = layer.base_layer(x)
    assert (output.shape, output.dtype) == (base.shape, base.dtype)
    output.sum().backward()
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and not parameter.grad.any(), name
    if forward is None:
        assert all(logits.shape[0] == 0 for logits in collection.logits) and len(collection.choices) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("steering", ["free", "forced", "allowed"])
@pytest.mark.parametrize(
    "own",
    [
        {},
        {"mixing": "projection"},
        BOTTLENECK,
        {"normalize_top_k": False, "lora_dropout": 0.3, "router_jitter_noise": 0.99},
        {"r": 64},
    ],
    ids=["output", "projection", "bottleneck", "noise", "wide"],
)
def test_no_tokens_give_zero_gradients(own, steering, dtype):
    layers = [ffn_layer(**{"r": 8, **own}, top_k=k) for k in (1, 3)]
    layers += [] if own is BOTTLENECK else [linear_layer(**{"r": 8, **own}, top_k=3)]
    for layer, method, shape in itertools.product(layers, METHODS, ((0, D), (2, 0, D), (0, 5, D))):
        layer.train().to(dtype)
        with pin_dispatch(method), steered(layer, steering, shape[0] if len(shape) == 3 else 0):
            check_without_tokens(layer, torch.zeros(shape, dtype=dtype, requires_grad=True))


@pytest.mark.parametrize("steering", ["free", "forced", "allowed"])
@pytest.mark.parametrize("kind", ROUTER_KINDS)
def test_every_router_does_without_tokens(kind, steering):
    mixings = [{"mixing": "projection"}] + ([] if kind == "switch" else [{"mixing": "output"}, BOTTLENECK])
    for own, dtype in itertools.product(mixings, (torch.float32, torch.bfloat16)):
        layer = routed_layer(kind, **own).train().to(dtype)
        with steered(layer, steering, 0):
            check_without_tokens(layer, torch.zeros(0, D, dtype=dtype, requires_grad=True))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "blocks", "gather"])
def test_a_compiled_layer_does_without_tokens(method):
    layer = ffn_layer(r=8)
    torch._dynamo.reset()
    with pin_dispatch(method):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        check_without_tokens(layer, torch.zeros(2, 0, D, requires_grad=True), compiled)


def test_steering_of_no_rows_fits_a_batch_of_none_only():
    model = adapted()
    for block in (
        force_experts(model, torch.zeros(0, dtype=torch.long)),
        allow_experts(model, torch.zeros(0, 4, dtype=torch.bool)),
    ):
        with block, pytest.raises(ValueError, match="0 rows are steered, the batch has 2 rows of 7 tokens"):
            model(input_ids=IDS)


# --- padding alone ----------------------------------------------------------------------------------------------------


def adapted(**own) -> nn.Module:
    torch.manual_seed(1)
    return get_peft_model(
        tiny_llama(hidden=16), MoELoraConfig(**{"num_experts": 4, "r": 4, "init_lora_weights": False, **own})
    )


def native() -> nn.Module:
    torch.manual_seed(0)
    model = NATIVE["mixtral"]()
    model.resize_token_embeddings(128)
    return model


class WithPadding:
    """A collator whose every other batch, from the first on, is padding alone."""

    def __init__(self, collator: Callable) -> None:
        self.collator, self.calls = collator, 0

    def __call__(self, examples: list) -> dict[str, torch.Tensor]:
        batch = self.collator(examples)
        self.calls += 1
        if self.calls % 2 == 0:
            return batch
        nothing = {"attention_mask": 0, "labels": -100, "token_labels": -1}
        return {name: torch.full_like(of, nothing[name]) if name in nothing else of for name, of in batch.items()}


LABELS = {"label_column": "domain", "expert_map": {"a": [0, 1], "b": [2, 3]}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "trainer", "own"),
    [
        (adapted, SFTTrainer, {}),
        (adapted, MoESFTTrainer, {"router_balancing": "layer", "router_global_batch": True}),
        (adapted, MoESFTTrainer, {**LABELS, "router_z_loss_coef": 0.1}),
        (adapted, MoESFTTrainer, {**LABELS, "router_label_mask": True, "router_label_tokens": "completion"}),
        (native, MoESFTTrainer, {**LABELS, "router_z_loss_coef": 0.1}),
    ],
    ids=["stock", "layer", "labels", "mask", "native"],
)
def test_a_step_of_padding_alone_changes_nothing(make, trainer, own, tokenizer, tmp_path):
    """With plain SGD, the training is the one that never sees these batches."""
    texts = [{"text": f"w{3 + i} w{9 + 2 * i} w{40 + i} w{5 * i + 3}", "domain": "ab"[i % 2]} for i in range(8)]
    settings = {
        "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 1e9, "learning_rate": 0.1,
        "train_sampling_strategy": "sequential", "router_aux_loss_coef": 1.0,
    }  # fmt: skip
    weights, config = [], SFTConfig if trainer is SFTTrainer else MoESFTConfig
    for padded, data in ((True, texts), (False, texts[4:])):
        own_arguments = arguments(tmp_path / str(padded), config, **settings, **own, max_steps=2 if padded else 1)
        made = trainer(
            model=make(), args=own_arguments, train_dataset=Dataset.from_list(data), processing_class=tokenizer
        )
        if padded:
            made.data_collator = WithPadding(made.data_collator)
        made.train()
        weights.append({name: p.detach() for name, p in made.model.named_parameters() if p.requires_grad})
        first = made.state.log_history[0]
        logged = {name: first[name] for name in ("loss", "aux_loss", "router_z_loss", "compliance") if name in first}
        assert not any(logged.values()) if padded else all(logged.values()), logged
        assert first.get("dead_experts", 0) == 0
    before = dict(make().named_parameters())
    for name, value in weights[1].items():
        assert_near(weights[0][name], value)
    assert any((value - before[name]).abs().max() > 1e-3 for name, value in weights[1].items())


@pytest.mark.parametrize("call", [{"fused_lm_head": True}, {}], ids=["fused", "plain"])
def test_the_balancing_loss_of_trls_fused_head_is_the_models(call, tokenizer, tmp_path):
    model = adapted()
    SFTTrainer(
        model=model, args=arguments(tmp_path, SFTConfig), train_dataset=Dataset.from_list([{"text": "w3 w4"}]),
        processing_class=tokenizer,
    )  # fmt: skip
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4])
    batch = {"input_ids": IDS, "attention_mask": mask, "labels": IDS.masked_fill(mask == 0, -100)}
    with torch.no_grad():
        actual = model(**batch, **call, output_router_logits=True)
        without = model(**batch, **call, output_router_logits=False)
        router_logits = model.get_base_model().model(IDS, mask, output_router_logits=True).router_logits
        expected = layer_balancing_loss(router_logits, 4, 2, mask)
    assert_near(actual.aux_loss, expected)
    assert_near(actual.loss, without.loss + 0.01 * expected)
    with model.disable_adapter():  # no router runs
        dense = model(**batch, fused_lm_head=True, output_router_logits=True)
        assert dense.aux_loss == 0 and dense.loss.isfinite()


@pytest.mark.parametrize("make", [adapted, native])
def test_a_row_of_padding_beside_real_ones_counts_for_nothing(make):
    model = make()
    results = []
    for rows in (1, 2):
        mask = torch.tensor([[1] * 7, [0] * 7])[:rows]
        model.zero_grad()
        outputs = model(
            input_ids=IDS[:rows], attention_mask=mask, labels=IDS[:rows].masked_fill(mask == 0, -100),
            output_router_logits=True,
        )  # fmt: skip
        outputs.loss.backward()
        results.append((outputs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (one, gradients), (two, again) = results
    assert_near(two.loss, one.loss)
    assert_near(two.aux_loss, one.aux_loss)
    for name, gradient in gradients.items():
        assert_near(again[name], gradient)


def test_a_sequence_of_one_real_token_has_its_own_loss():
    model = adapted()
    outputs = model(
        input_ids=IDS[:1], attention_mask=torch.tensor([[1] + [0] * 6]), labels=IDS[:1], output_router_logits=True
    )
    alone = [logits[:1] for logits in outputs.router_logits]
    assert_near(outputs.aux_loss, balancing_loss(alone, 2))
    outputs.aux_loss.backward()
    assert all(p.grad.isfinite().all() for name, p in model.named_parameters() if "router" in name)


def test_statistics_of_no_token_are_numbers_and_no_verdict():
    statistics = RoutingStatistics([4, 4], [2, 2], ("a", "b"), {"a": [0], "b": [1]})
    logits = [torch.randn(6, 4) for _ in range(2)]
    for domains, shape in ((["a", "b"], (2, 3)), ([], (0, 3)), (["a", "b"], (2, 0))):
        statistics.current = domains
        tokens = math.prod(shape)
        statistics.update([of[:tokens] for of in logits], torch.zeros(shape, dtype=torch.long), None)
    report = json.loads(json.dumps(statistics.as_dict(), allow_nan=False))
    assert report["mean_compliance"] is None and report["shares"] == {} and report["warning"] == ""
    assert report["load"]["dead"] == 0
    assert report["load"]["status"] == "unknown"
    # A continued cache whose step has no tokens adds none of the cache's.
    statistics.update([of[:0] for of in logits], torch.ones(2, 5, dtype=torch.long), None)
    assert not statistics.tokens.any()
    # Tokens that no expert serves (every gate is 0) have no shares, rather than NaN.
    statistics.update(logits, torch.ones(2, 3, dtype=torch.long), None, [torch.zeros(6, 4, dtype=torch.bool)] * 2)
    assert not torch.stack(list(statistics.shares().values())).any()
    assert statistics.tokens.tolist() == [3, 3]


def test_the_load_callback_leaves_out_steps_without_tokens(tmp_path):
    model = adapted()
    callback = LoadCallback(tmp_path, every=1)
    callback.on_train_begin(None, None, None, model=model)
    for step, real in enumerate((0, 1, 0, 1), start=1):
        model(input_ids=IDS, attention_mask=torch.full_like(IDS, real))
        callback.on_step_end(None, SimpleNamespace(global_step=step, is_world_process_zero=True), None)
    callback._recording.close()
    assert [point["step"] for point in callback.points] == [2, 4]


def test_recording_a_batch_of_padding_counts_nothing():
    model = adapted()
    with record_routing(model) as statistics:
        model(input_ids=IDS, attention_mask=torch.zeros_like(IDS))
        assert not statistics.tokens.any() and not statistics.counts.any()
        model(input_ids=IDS, attention_mask=torch.tensor([[1] + [0] * 6, [0] * 7]))
    assert statistics.tokens.tolist() == [1] and statistics.counts.sum(2).tolist() == [[2, 2]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: mean_loss(torch.zeros(3, 1), torch.zeros(3), "evaluate: 'code'"),
            "evaluate: 'code': none of 3 examples has a token to score; raise max_length, or leave it out",
        ),
        (
            lambda: perplexity_buckets(torch.tensor([[1.0, 2.0], [math.nan, 1.0]])),
            "perplexity_buckets: no perplexity for examples 1: they have no token to score, or their loss is not "
            "finite; leave them out, or raise max_length",
        ),
        (
            lambda: expand([lora(0), {name: x * math.nan for name, x in lora(1).items()}], 3),
            "experts[1]: m.lora_A.weight holds NaN or infinity; train or save it again",
        ),
        (
            lambda: dare_merge(*([{"w": torch.full((999,), 2e3).half()}] * 2), 0.5, 0.99, torch.Generator()),
            "drop_rate=0.99: values divided by 0.01 are not finite in torch.float16, or a parent's are not; use a "
            "lower drop_rate, or repair the parent",
        ),
    ],
    ids=["no-token", "no-perplexity", "nan-expert", "overflow"],
)
def test_what_has_no_answer_is_refused_on_one_line(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


def test_an_example_without_a_token_to_score_has_no_perplexity():
    model = adapted()
    data = Dataset.from_list([{"input_ids": [5, 6, 7]}, {"input_ids": [9]}, {"input_ids": []}])

    def collator(examples: list[dict]) -> dict[str, torch.Tensor]:
        rows = [example["input_ids"] for example in examples]
        lengths = torch.tensor([len(row) for row in rows]).unsqueeze(1)
        ids = torch.tensor([row + [0] * (3 - len(row)) for row in rows])
        mask = torch.arange(3) < lengths
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}

    losses_S, counts_S = example_losses(model, data, collator)
    assert counts_S.tolist() == [2, 0, 0] and losses_S.shape == (3,)
    assert losses_S[0] > 1 and not losses_S[1:].any()
    assert math.isfinite(mean_loss(losses_S, counts_S, "all"))
    with pytest.raises(ValueError, match=r"no perplexity for examples 1, 2"):
        perplexity_buckets((losses_S / counts_S).exp().unsqueeze(1))


@pytest.mark.parametrize("kind", ["lora", "moe"])
def test_a_lora_on_the_head_counts_in_losses(kind):
    """TRL's fused head, which gives them else, reads the weight beneath it alone."""
    settings = {"target_modules": ["up_proj", "lm_head"], "r": 4, "task_type": "CAUSAL_LM"}
    moe = {"target_modules": ["mlp", "lm_head"], "num_experts": 3, "num_experts_pattern": {"lm_head": 1}}
    config = LoraConfig(**settings) if kind == "lora" else MoELoraConfig(**settings | moe)
    model = get_peft_model(tiny_llama(), config).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    ids = torch.randint(3, 100, (5, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids).logits
    labels = ids.clone()
    labels[:3, 1:] = logits[:3, :-1].argmax(-1)  # the most probable tokens, of three rows
    labels[:, :2] = -100
    ids_and_labels = Dataset.from_list([{"i": i} for i in range(5)])

    def collator(examples: list[dict]) -> dict[str, torch.Tensor]:
        rows = [example["i"] for example in examples]
        return {"input_ids": ids[rows], "labels": labels[rows], "attention_mask": torch.ones(len(rows), 9).long()}

    answers = example_answers(model, ids_and_labels, collator, rows=2)
    losses = -logits.double().log_softmax(-1)[:, 1:-1].gather(-1, labels[:, 2:, None])[..., 0].sum(-1)
    assert_near(answers.losses, losses, dtype=torch.float32)
    assert answers.counts.tolist() == [7] * 5 and answers.right.tolist() == [True] * 3 + [False] * 2


def test_perplexities_that_are_infinite_or_equal_have_an_order():
    assert perplexity_buckets(torch.tensor([[1.0, INF], [INF, 2.0], [INF, INF], [3.0, 3.0]])) == [[0, 2], [1, 3]]
    assert perplexity_buckets(torch.ones(5, 2)) == [[0, 1, 2], [3, 4]]


# --- values at the limits: gates and losses ---------------------------------------------------------------------------


def edge_logits(n: int) -> dict[str, torch.Tensor]:
    """float32 [T, n] by what is particular about them."""
    random = torch.randn(16, n, generator=torch.Generator().manual_seed(n))
    masked, alone = random.clone(), torch.full((16, n), -INF)
    masked[:, n // 2] = -INF
    alone[:, n // 2] = -1e4
    return {
        "1e4": random * 1e4,
        "close": torch.where(random > 0, 1e4, -1e4) + torch.arange(n),  # 1e4 apart from some, 1 from others
        "largest": random.sign() * LARGEST * torch.rand(16, n, generator=torch.Generator().manual_seed(0)),
        "equal": torch.full((16, n), 1e4),
        "equal-low": torch.full((16, n), -LARGEST),
        "subnormal": random * 1e-40,
        "one-masked": masked,
        "one-left": alone,
    }


GATES = {
    "top_k": lambda logits, k, normalize: top_k_gates(logits, k, normalize),
    "sigmoid": lambda logits, k, normalize: sigmoid_gates(logits, k, normalize),
    "top_p": lambda logits, k, normalize: top_p_gates(logits, k, normalize, 0.6),
    "top_p-all": lambda logits, k, normalize: top_p_gates(logits, k, normalize, 1.0),
    "threshold": lambda logits, k, normalize: threshold_gates(logits, k, normalize, 0.2),
    "threshold-even": lambda logits, k, normalize: threshold_gates(logits, k, normalize, 1 / logits.shape[1]),
    "switch": lambda logits, k, normalize: switch_gates(logits),
}


def plain_gates(kind: str, logits_N: torch.Tensor, experts: list[int], normalize: bool) -> list[torch.Tensor]:
    """The gates of one token's chosen experts, by the formulas, in float64."""
    n = len(logits_N)
    shifted = (logits_N - logits_N.max()).exp()
    p = shifted / shifted.sum()
    score = torch.sigmoid(logits_N) if kind == "sigmoid" else p
    kept, before = [], 0.0
    for place, i in enumerate(experts):
        value = p[i].item()
        stays = {"top_p": before < 0.6, "threshold": value >= 0.2, "threshold-even": value >= 1 / n - 1e-9}
        kept.append(place == 0 or stays.get(kind, True))
        before += value
    chosen = [score[i] if keep else score[i] * 0 for i, keep in zip(experts, kept, strict=True)]
    if normalize and len(chosen) == 1:  # straight-through
        return [1 + (chosen[0] - chosen[0].detach())]
    if normalize and kind == "sigmoid":  # logarithms: all sigmoids may be 0
        logs = torch.stack([-torch.logaddexp(torch.zeros_like(logits_N[i]), -logits_N[i]) for i in experts])
        return list((logs - logs.logsumexp(0)).exp())
    return [gate / sum(chosen) for gate in chosen] if normalize else chosen


@pytest.mark.parametrize("n, k", [(8, 1), (7, 3), (16, 16)])
@pytest.mark.parametrize("kind", GATES)
def test_gates_and_their_gradients_are_float64s_whatever_the_logits(kind, n, k):
    if kind == "switch" and k > 1:
        return
    weight_N = torch.linspace(-1, 1, n, dtype=torch.float64)
    for name, normalize in itertools.product(edge_logits(n), (True, False)):
        logits = edge_logits(n)[name]
        leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
        gates_TK, experts_TK = GATES[kind](leaf, k, normalize and kind != "switch")
        (gates_TK * weight_N[experts_TK].float()).sum().backward()
        top_TK = logits.topk(k).values
        assert torch.equal(logits.gather(1, experts_TK), top_TK), name
        for t in range(0, len(logits), 5):
            experts = experts_TK[t].tolist()
            expected = plain_gates(kind, exact[t], experts, normalize and kind != "switch")
            assert_near(gates_TK[t], torch.stack(expected), f"{name}: gates")
            if logits[t].isfinite().all():
                (gradient,) = torch.autograd.grad(
                    sum(g * weight_N[i] for g, i in zip(expected, experts, strict=True)), exact
                )
                assert_near(leaf.grad[t], gradient[t], name, scale=1.0)  # differences of gates
        assert leaf.grad.isfinite().all(), name
        assert not leaf.grad[logits == -INF].any(), name


@pytest.mark.parametrize("capacity", [1, 3, 100])
def test_capacity_takes_the_first_tokens_also_where_all_logits_are_equal(capacity):
    for name in ("1e4", "equal", "one-left"):
        logits = edge_logits(4)[name]
        gates_T1, experts_T1 = switch_gates(logits, capacity)
        taken = [0] * 4
        for t, expert in enumerate(experts_T1.flatten().tolist()):
            taken[expert] += 1
            expected = plain_gates("switch", logits[t].double(), [expert], False)[0] * (taken[expert] <= capacity)
            assert gates_T1[t].item() == near(expected.item(), scale=1.0)


def test_experts_of_equal_probability_all_reach_the_even_threshold():
    for n in range(2, 130):
        gates_TK, _ = threshold_gates(torch.full((1, n), 1e4), n, True, 1 / n)
        assert_near(gates_TK, torch.full((1, n), 1 / n))


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("n, k", [(8, 1), (8, 2), (64, 64), (64, 3)])
def test_the_balancing_loss_counts_the_chosen_experts_whatever_the_logits(n, k, scope):
    for name, logits in edge_logits(n).items():
        layers = [logits, (logits.flip(1) * 0.5).contiguous()]
        leaves = [layer.clone().requires_grad_() for layer in layers]
        loss = balancing_loss(leaves, k, scope=scope)
        loss.backward()
        f, P = torch.zeros(2, n, dtype=torch.float64), []
        for layer, own in enumerate(layers):
            for t, experts in enumerate(own.topk(k).indices.tolist()):
                f[layer, experts] += 1 / len(own)
                assert own[t, experts].min() >= own[t].sort().values[-k]
            P.append(torch.softmax(own.double(), 1).mean(0))
        f, P = (x.mean(0, keepdim=True) if scope == "global" else x for x in (f, torch.stack(P)))
        assert loss.item() == near(n * float((f * P).sum(1).mean())), name
        assert all(leaf.grad.isfinite().all() for leaf in leaves), name


def test_losses_of_tokens_are_float64s_whatever_the_logits():
    allowed_TN = torch.arange(8).expand(16, 8) >= 4
    for name, logits in edge_logits(8).items():
        for loss_of, exact_of in (
            (lambda x: z_losses([x]), lambda x: x.logsumexp(1) ** 2),
            # Not to the precision of the logits, but to that of the loss.
            (
                lambda x: label_losses([x], allowed_TN),
                lambda x: -(x - x.logsumexp(1, True)).masked_fill(~allowed_TN, -INF).logsumexp(1),
            ),
        ):
            leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
            loss_T, exact_T = loss_of(leaf), exact_of(exact)
            assert_near(loss_T, exact_T, name)
            (gradient,) = torch.autograd.grad(loss_T.sum(), leaf)
            (expected,) = torch.autograd.grad(exact_T.sum(), exact)
            # A probability is as precise as the difference of two logits in float32.
            scale = expected.abs().max().clamp(min=1) * logits[logits > -INF].abs().max().clamp(min=1)
            assert_near(gradient, expected, name, scale=scale)


def test_a_forced_expert_has_gate_1_whatever_its_logit():
    logits = torch.tensor([[INF, 0.0], [-INF, 0.0], [math.nan, 1.0], [LARGEST, 1.0]], requires_grad=True)
    gates_TK, experts_TK = ForcedExperts(torch.tensor([0])).route(logits, 1, True)
    gates_TK.sum().backward()
    assert torch.equal(gates_TK, torch.ones(4, 1)) and not experts_TK.any() and not logits.grad.any()


# --- values at the limits: layers -------------------------------------------------------------------------------------

SHAPES = [{}, {"mixing": "projection"}, BOTTLENECK, {"num_experts": 64, "top_k": 64}, {"normalize_top_k": False}]


@pytest.mark.parametrize("own", SHAPES, ids=["output", "projection", "bottleneck", "all-of-64", "probabilities"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_layers_of_half_precision_are_float64s_at_the_limits(dtype, own):
    limits = torch.finfo(dtype)
    for scale, of_router in ((1.0, 2500.0), (limits.max / 32, 32 / limits.max), (limits.tiny / 4, 1 / limits.tiny)):
        for method in ("auto", "blocks", "gather") if "num_experts" not in own else ("auto",):
            layer = ffn_layer(**{"r": 8, "lora_alpha": None if own == BOTTLENECK else 16, **own})
            with torch.no_grad():
                layer.router("default").weight.mul_(of_router)
                for parameter in (*layer.base_layer.parameters(), *layer.expert_parameters("default")[1].values()):
                    parameter.mul_(min(1.0, 10 / scale))
            layer.base_layer.to(dtype)
            x, d_output = tensors(10)
            x, d_output = (x * scale).to(dtype), (d_output / 256).to(dtype)  # as small as a mean makes it
            with pin_dispatch(method):
                actual = run(layer, x, d_output)
            expected = reference(layer, x, d_output)
            assert_near(actual.output, expected.output, f"{scale}: output")
            for name, gradient in actual.gradients.items():
                assert gradient.isfinite().all(), (scale, method, name)
                if scale == 1.0:
                    # Saturated gates: of a router's gradient is left what 1 - p has in float32.
                    left = torch.finfo(torch.float32).eps if "router" in name else 0.0
                    assert_near(gradient, expected.gradients[name], name, dtype=dtype, scale=left)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "own",
    [{}, {"mixing": "projection"}, BOTTLENECK, {"num_experts": 16, "r": 16}],
    ids=["output", "projection", "bottleneck", "wide"],
)
def test_an_expert_that_no_token_chose_may_overflow(own, method):
    """Its product with a token is infinite in float16; multiplied by a gate of 0, that would be NaN."""
    for large in ("moe_lora_A", "moe_lora_B"):
        layer = ffn_layer(**{"r": 8, **own})
        layer.base_layer.to(torch.float16)
        x, d_output = tensors(10)
        x, d_output = (x[:1] + 0.01 * x).to(torch.float16), d_output.to(torch.float16)  # tokens that choose alike
        chosen = {expert for experts in chosen_experts(layer, x) for expert in experts}
        others = [i for i in range(layer.moe_lora_spec["default"].num_experts) if i not in chosen]
        with torch.no_grad():
            for weight in getattr(layer, large)["default"].values():
                weight[others] *= 1e5
                assert weight.half().isfinite().all()
        assert others
        with pin_dispatch(method):
            expected = reference(layer, x, d_output)
            # The router's gradient is a difference of the experts'.
            assert_same(run(layer, x, d_output), expected, scale=expected.gradients["x"])


# --- values at the limits: experts' weights ---------------------------------------------------------------------------


def lora(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"m.lora_A.weight": (64, 32), "m.lora_B.weight": (48, 64)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("similarity", ["update", "values"])
def test_zero_and_equal_experts_expand_to_finite_ones(similarity):
    one, zero = lora(0), {name: torch.zeros_like(x) for name, x in lora(0).items()}
    for family, first in (([zero, zero], 0.0), ([one, one], 1.0), ([one, zero], 0.0), ([one, one, zero], 0.0)):
        made, descents = expand(family, 6, similarity=similarity)
        assert descents[0].similarity == near(first)
        assert all(math.isfinite(descent.similarity) for descent in descents)
        assert all(x.isfinite().all() for expert in made for x in expert.values())


def test_similarity_of_zero_experts_is_a_number():
    A_NRI, B_NRO = torch.randn(3, 2, 5), torch.randn(3, 2, 4)
    B_NRO[1:] = 0  # new LoRA experts
    cosines = similarities(update_gram(A_NRI, B_NRO))
    assert torch.equal(cosines, torch.eye(3, dtype=torch.float64))
    assert likeness(cosines) == (0, 0, 0)


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.999, 1 - 1e-12])
def test_dare_is_the_plain_loop_at_every_rate(rate):
    a, b = lora(0), lora(1)
    made = dare_merge(a, b, 0.3, rate, torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    for name in sorted(a):
        kept = [torch.rand(a[name].shape, generator=generator).double() >= rate for _ in range(2)]
        expected = (0.3 * a[name].double() * kept[0] + 0.7 * b[name].double() * kept[1]) / (1 - rate)
        assert_near(made[name], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", INITIALISATIONS)
def test_experts_of_constant_weights_are_made_without_nan(method, dtype):
    for value in (0.0, 0.5, 1e-7, 3e4):
        ffn = FFN(*(torch.full(shape, value, dtype=dtype) for shape in ((8, 4), (8, 4), (4, 8))))
        for expert in range(2):
            made = ExpertInit(method=method).make(ffn, expert, 2, generator_for(0, method, expert))
            for own, weight in zip(made, ffn, strict=True):
                assert own.isfinite().all()
                if method not in (
                    "random_noise",
                    "subset",
                    "random",
                    "scratch",
                ):  # σ is 0, so what is drawn anew is the mean
                    assert_near(own.float(), weight.float())


def test_experts_with_zero_B_export_as_the_base_bit_for_bit(tmp_path):
    base = saved(dense_model("llama"), tmp_path / "base")
    saved_adapter(dense_model("llama"), tmp_path / "adapter", base, init_lora_weights=True)
    export_adapter(tmp_path / "adapter", tmp_path / "moe")
    dense, moe = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "moe"))
    for layer, expert in itertools.product(range(2), range(4)):
        for own, name in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            exported = moe[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{own}.weight"]
            assert torch.equal(exported, dense[f"model.layers.{layer}.mlp.{name}.weight"])
    ours, theirs = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("base", "moe"))
    assert_near(theirs(input_ids=IDS).logits, ours(input_ids=IDS).logits)


def test_weights_that_overflow_the_dtype_of_a_checkpoint_are_refused(tmp_path):
    with ShardedWriter(tmp_path, {"w": (torch.float16, torch.Size([2]))}) as writer:
        with pytest.raises(ValueError, match=r"^w: values up to 7e\+04 overflow dtype float16; use bfloat16$"):
            writer.write("w", torch.tensor([7e4, 1.0]))
        writer.write("w", torch.tensor([LARGEST, 1.0]))


@torch.no_grad()
def test_an_answer_is_right_whatever_a_template_puts_after_its_end():
    """Decoding stops at the end, so the line break after it is nobody's."""
    model = tiny_llama().eval()
    ids = [5, 9, 50]
    for _ in range(3):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    end, after = ids[-1], int(model(torch.tensor([ids])).logits[0, -1].argmin())
    rows = Dataset.from_list([{"input_ids": [*ids, after], "labels": [-100] * 3 + [*ids[3:], after]}] * 2)

    def collate(batch):
        return {name: torch.tensor([row[name] for row in batch]) for name in ("input_ids", "labels")}

    for ends, right in ((None, False), (end, True), ([1, end], True)):
        model.generation_config.eos_token_id = ends
        assert example_answers(model, rows, collate).right.tolist() == [right] * 2
