"""Adapters on quantized bases: bitsandbytes 4-bit and 8-bit, torchao int8; trained, saved, and moved between bases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from datasets import Dataset
from peft import PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

from moe_peft import MoELoraConfig, MoESFTConfig, MoESFTTrainer
from tests.helpers.models import tiny_llama

IDS = torch.randint(3, 128, (2, 10), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Quantizer:
    """
    Args:
        config: transformers' quantization config.
        dequantize: the weight that a quantized linear stands for.
        change: relative change of the logits that quantizing this model makes.
        training: relative error of training on it, against training on the weights it stands for (by device).
        evaluation: relative error of the logits in evaluation, against those in training.
    """

    config: Callable[[], Any]
    dequantize: Callable[[nn.Module], torch.Tensor]
    change: float
    training: dict[str, float]
    evaluation: float


def dequantize_8bit(linear: nn.Module) -> torch.Tensor:
    parts = linear.weight if linear.state.CB is None else linear.state  # the first forward moves them
    return parts.CB.float() * parts.SCB.unsqueeze(1) / 127


QUANTIZERS = {
    "4-bit": Quantizer(
        lambda: BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        ),
        lambda linear: bnb.functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state),
        change=0.25,
        training={"cpu": 1e-5, "cuda": 1e-4},
        evaluation=0.02,  # on CPUs with such products, activations are rounded to bfloat16
    ),
    "8-bit": Quantizer(
        lambda: BitsAndBytesConfig(load_in_8bit=True),
        dequantize_8bit,
        change=0.03,
        training={"cpu": 1e-5, "cuda": 0.03},
        evaluation=0.03,  # activations are rounded to 8 bits
    ),
    "torchao": Quantizer(
        lambda: TorchAoConfig(Int8WeightOnlyConfig()),
        lambda linear: linear.weight.dequantize(),
        change=0.03,
        training={"cpu": 1e-5, "cuda": 1e-4},
        evaluation=1e-5,
    ),
}

KINDS: dict[str, dict[str, Any]] = {
    "output": {"mixing": "output"},
    "projection": {"mixing": "projection"},
    "linears": {"target_modules": ["q_proj", "down_proj"]},
    "bottleneck": {
        "expert_type": "bottleneck",
        "bottleneck_size": 8,
        "target_modules": ["mlp", "q_proj", "v_proj", "o_proj"],
    },
}

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS),
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.filterwarnings("ignore:.*use_reentrant parameter should be passed explicitly"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("base")
    base = tiny_llama(eos_token_id=None)  # its sizes are multiples of 32, as 4-bit products on a CPU need
    base.save_pretrained(path)
    return str(path)


def load(folder: str, device: str, quantizer: Quantizer | None = None) -> PreTrainedModel:
    config = {} if quantizer is None else {"quantization_config": quantizer.config()}
    return AutoModelForCausalLM.from_pretrained(folder, device_map={"": device}, **config)


def adapted(base: PreTrainedModel, kind: str, **kwargs: Any) -> PeftModel:
    torch.manual_seed(1)
    config = {"num_experts": 4, "top_k": 2, "r": 4, "init_lora_weights": False, **KINDS[kind], **kwargs}
    return get_peft_model(base, MoELoraConfig(task_type="CAUSAL_LM", **config))


def adapted_smoothly(base: PreTrainedModel, kind: str) -> PeftModel:
    """All experts are active: a rounding error changes the logits a little, and never which experts are chosen."""
    return adapted(base, kind, top_k=4)


def test_the_status_and_the_repr_of_a_layer_name_the_quantization(folder, device, quantizer):
    model = adapted(load(folder, device, quantizer), "linears", target_modules=["mlp", "q_proj"])
    backends = {status.quantization_backend for status in model.get_layer_status()}
    assert len(backends) == 1 and None not in backends
    assert f"quantization_backend='{backends.pop()}'" in repr(model.base_model.model.model.layers[0].mlp)
    plain = adapted(load(folder, device), "output")
    assert {status.quantization_backend for status in plain.get_layer_status()} == {None}


def quantized_linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linears inside the decoder layers, by the names they have in the base model."""
    return {
        name.replace(".base_layer", ""): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name
    }


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if "moe_lora_" in name}


def train_logits(model: nn.Module) -> torch.Tensor:
    """
    The logits that training sees. There is no dropout; only, in evaluation bitsandbytes' 4-bit product on a CPU rounds
    to bfloat16, and not always in the same way.
    """
    model.train()
    return model(input_ids=IDS.to(model.device)).logits.detach().float()


def train(model: PeftModel, steps: int) -> list[float]:
    ids = IDS.to(model.device)
    model.train()
    optimizer = torch.optim.AdamW(adapter_tensors(model).values(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("kind", KINDS)
def test_training_reaches_every_adapter_parameter_and_nothing_else(
    quantizer: Quantizer, device: str, kind: str, folder: str
):
    base = load(folder, device, quantizer)
    weights = {name: quantizer.dequantize(linear).clone() for name, linear in quantized_linears(base).items()}
    model = adapted(prepare_model_for_kbit_training(base), kind, init_lora_weights=True)
    losses = train(model, steps=8)
    assert losses[-1] < losses[0] - 0.4
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("moe_lora_" in name), name
        if parameter.requires_grad:
            assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name
        else:
            assert parameter.grad is None, name
    for name, linear in quantized_linears(base).items():
        torch.testing.assert_close(quantizer.dequantize(linear), weights[name], rtol=0, atol=0)


@pytest.mark.parametrize("num_experts, r", [(1, 4), (4, 8), (16, 16)])
@pytest.mark.parametrize("kind", KINDS)
def test_training_under_autocast_has_the_gradients_up_to_its_rounding(
    quantizer: Quantizer, device: str, kind: str, num_experts: int, r: int, folder: str
):
    # Norms are in float32, and quantized linears give back the dtype they get, whatever autocast is on.
    base = prepare_model_for_kbit_training(load(folder, device, quantizer), use_gradient_checkpointing=False)
    model = adapted(base, kind, num_experts=num_experts, top_k=num_experts, r=r, lora_alpha=r).train()
    ids = IDS.to(device)
    gradients = []
    for enabled in (False, True):
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in adapter_tensors(model).items()})
        model.zero_grad()
    for name, exact in gradients[0].items():
        assert relative_error(gradients[1][name], exact) < 0.1 or exact.abs().max() < 1e-4, name


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_on_the_base_that_the_quantized_weights_stand_for(
    quantizer: Quantizer, device: str, kind: str, folder: str
):
    quantized, full = load(folder, device, quantizer), load(folder, device)
    for name, linear in quantized_linears(quantized).items():
        full.get_submodule(name).weight.data.copy_(quantizer.dequantize(linear))
    error = quantizer.training[device]  # of another kind than rounding: on GPUs kernels quantize activations, too
    adapt = adapted if error < 1e-3 else adapted_smoothly
    models = [adapt(base, kind).train() for base in (quantized, full)]
    ids = IDS.to(device)
    losses = [model(input_ids=ids, labels=ids).loss for model in models]
    torch.testing.assert_close(losses[0], losses[1], rtol=error, atol=0)
    for loss in losses:
        loss.backward()
    expected = adapter_tensors(models[1])
    for name, parameter in adapter_tensors(models[0]).items():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=0)
        assert relative_error(parameter.grad, expected[name].grad) < 10 * error, name


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_trained_on_a_quantized_base_loads_there_and_on_a_full_precision_one(
    quantizer: Quantizer, device: str, kind: str, folder: str, tmp_path
):
    model = adapted_smoothly(prepare_model_for_kbit_training(load(folder, device, quantizer)), kind)
    train(model, steps=3)
    expected = train_logits(model)
    model.save_pretrained(tmp_path)

    again = PeftModel.from_pretrained(load(folder, device, quantizer), tmp_path)
    # Exactly, but on a GPU kernels may sum in another order.
    torch.testing.assert_close(train_logits(again), expected, rtol=0, atol=0 if device == "cpu" else 1e-4)

    base = load(folder, device)
    unadapted = train_logits(base)
    full = PeftModel.from_pretrained(base, tmp_path)
    for name, parameter in adapter_tensors(full).items():
        torch.testing.assert_close(parameter.detach(), model.get_parameter(name).detach(), rtol=0, atol=0)
    assert relative_error(train_logits(full), expected) < quantizer.change
    assert relative_error(unadapted, expected) > 2 * quantizer.change


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_trained_on_a_full_precision_base_loads_on_a_quantized_one(
    quantizer: Quantizer, device: str, kind: str, folder: str, tmp_path
):
    full = adapted_smoothly(load(folder, device), kind)
    train(full, steps=3)
    full.save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(load(folder, device, quantizer), tmp_path, is_trainable=True)
    for name, parameter in adapter_tensors(model).items():
        torch.testing.assert_close(parameter.detach(), full.get_parameter(name).detach(), rtol=0, atol=0)
    assert relative_error(train_logits(model), train_logits(full)) < quantizer.change
    losses = train(model, steps=4)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_model_generates(quantizer: Quantizer, device: str, kind: str, folder: str):
    model = adapted_smoothly(load(folder, device, quantizer), kind)
    expected = train_logits(model)
    model.eval()
    ids = IDS.to(device)
    with torch.no_grad():
        logits = model(input_ids=ids).logits.float()
    assert relative_error(logits, expected) < quantizer.evaluation
    tokens = model.generate(input_ids=ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert tokens.shape == (2, 13)
    assert tokens[:, 10].tolist() == logits[:, -1].argmax(-1).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_unload_gives_the_quantized_base_back(quantizer: Quantizer, device: str, kind: str, folder: str):
    base = load(folder, device, quantizer)
    expected = train_logits(base)
    linears = quantized_linears(base)
    model = adapted(base, kind)
    assert not torch.equal(train_logits(model), expected)
    assert model.unload() is base
    assert quantized_linears(base) == linears  # the very modules
    torch.testing.assert_close(train_logits(base), expected, rtol=0, atol=0 if device == "cpu" else 1e-4)  # as above


@pytest.mark.parametrize("kind", KINDS)
def test_injection_leaves_the_quantized_weights_in_their_format(
    quantizer: Quantizer, device: str, kind: str, folder: str
):
    """
    On CPUs with bfloat16 products, a 4-bit linear that once runs in evaluation mode repacks its weight for inference,
    and no gradient passes it any more.
    """
    base = load(folder, device, quantizer)
    before = {
        name: (linear.training, linear.weight.shape, quantizer.dequantize(linear).clone())
        for name, linear in quantized_linears(base).items()
    }
    adapted(base, kind)
    for name, linear in quantized_linears(base).items():
        training, shape, weight = before[name]
        assert (linear.training, linear.weight.shape) == (training, shape), name
        torch.testing.assert_close(quantizer.dequantize(linear), weight, rtol=0, atol=0)


def test_adapters_on_quantized_bases_bring_no_warning(folder, device, quantizer, tokenizer, tmp_path, caplog):
    """On bases of bitsandbytes TRL makes them bfloat16, whatever the base's dtype is."""
    args = MoESFTConfig(str(tmp_path), max_steps=1, use_cpu=device == "cpu", bf16=False, report_to="none", save_steps=9)
    trainer = MoESFTTrainer(
        adapted(load(folder, device, quantizer), "output"), args,
        train_dataset=Dataset.from_list([{"text": "w3 w4 w5"}] * 8), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    kinds = {p.dtype for p in trainer.model.parameters() if p.requires_grad}
    assert (torch.bfloat16 in kinds) == (quantizer is not QUANTIZERS["torchao"])
    assert "parameters are trained in" not in caplog.text
