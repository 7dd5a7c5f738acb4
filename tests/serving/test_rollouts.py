"""
TRL's GRPO with `use_vllm` rolls out from the adapter in training, which is sent unmerged. `make test-vllm` runs this.
"""

from __future__ import annotations

import functools
import importlib.util

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from moe_peft import MoELoraConfig
from moe_peft.training.router_losses import RouterLossesMixin
from tests.helpers.native_case import adapter, dense_model, saved

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM has an environment of its own", allow_module_level=True)

from tests.helpers.vllm_case import KINDS, PROMPTS, SIZE, distributions, engine, expected

ON_ATTENTION = {"target_modules": ["mlp", "q_proj", "v_proj"], "num_experts_pattern": {"v_proj": 1}}


@pytest.fixture
def grpo(monkeypatch):
    """GRPO with router losses, whose engine computes in float32."""
    import trl.generation.vllm_generation as generation
    from trl import GRPOTrainer
    from vllm import LLM

    monkeypatch.setattr(generation, "LLM", functools.partial(LLM, dtype="float32", enforce_eager=True))
    return type("MoEGRPOTrainer", (RouterLossesMixin, GRPOTrainer), {})


def make_trainer(grpo, tmp_path, tokenizer, **settings):
    from trl import GRPOConfig

    base = dense_model("llama", **SIZE, **KINDS["llama"])
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    config = MoELoraConfig(num_experts=4, r=4, task_type="CAUSAL_LM", **{**ON_ATTENTION, **settings})

    def reward(completions, **columns):
        return [float(len(set(text.split()))) for text in completions]

    args = GRPOConfig(
        str(tmp_path / "out"), use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.05,
        vllm_max_model_length=64, num_generations=4, per_device_train_batch_size=4, max_completion_length=6,
        max_steps=10, learning_rate=1e-2, use_cpu=True, bf16=False, report_to="none", save_strategy="no", seed=0,
        gradient_checkpointing=False, disable_tqdm=True, temperature=1.0,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": f"w{i} w{i + 1}"} for i in range(3, 23)])
    return grpo(get_peft_model(base, config), reward, args, train_dataset=rows, processing_class=tokenizer)


def test_rollouts_are_of_the_adapter_in_training(grpo, tokenizer, tmp_path, monkeypatch):
    trainer = make_trainer(grpo, tmp_path, tokenizer, modules_to_save=["norm"])
    generation, sent = trainer.vllm_generation, []
    iterate, generate = generation._iter_named_params, generation.generate

    def named_params():
        for name, tensor in iterate():
            sent.append(name)
            yield name, tensor

    differences, first = [], {k: v.clone() for k, v in trainer.model.state_dict().items() if "moe_lora" in k}

    def compared(prompts, *args, **kwargs):
        outputs = generate(prompts, *args, **kwargs)
        trainer.model.eval()
        for prompt, completion, logprobs in zip(*outputs[:3], strict=True):
            with torch.no_grad():
                logits = trainer.model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            own = logits.log_softmax(-1).gather(1, torch.tensor(completion).unsqueeze(1))
            differences.append(float((own - torch.tensor(logprobs)).abs().max()))
        trainer.model.train()
        return outputs

    monkeypatch.setattr(generation, "_iter_named_params", named_params)
    monkeypatch.setattr(generation, "generate", compared)
    trainer.train()
    assert len(differences) == 40 and max(differences) < 1e-3
    assert all(not torch.equal(v, first[k]) for k, v in trainer.model.state_dict().items() if "moe_lora_B" in k)
    # What an adapter's file holds is sent at each step, and nothing else.
    trainer.model.save_pretrained(tmp_path / "adapter")
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        names = [key.removeprefix("base_model.model.") for key in file.keys()]  # noqa: SIM118
    assert sorted(sent) == sorted(names * 10)


def test_rows_of_tokens_are_refused(grpo, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"^use_vllm=True: trainable_token_indices: vLLM is not sent single rows"):
        make_trainer(grpo, tmp_path, tokenizer, trainable_token_indices=[5])


def test_a_server_s_engine_takes_another_adapter_while_it_runs(tmp_path):
    """TRL's server mode needs NCCL; this is what vLLM does with the tensors that arrive by it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    name = saved(dense_model("llama", **SIZE, **KINDS["llama"]), tmp_path / "base")
    models = {}
    for other in (False, True):
        folder = tmp_path / f"adapter-{other}"
        model = adapter(
            AutoModelForCausalLM.from_pretrained(name), folder, name, modules_to_save=["norm"], **ON_ATTENTION
        )
        if other:
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if "moe_lora" in key or "modules_to_save" in key:
                        parameter.mul_(0.5)
            model.save_pretrained(folder)
        models[folder] = model.double()
    first, second = models
    llm = engine(first)
    assert_equal(llm, models[first])
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    with set_current_vllm_config(runner.vllm_config), torch.device("cpu"):
        initialize_layerwise_reload(runner.model)
        with safe_open(second / "adapter_model.safetensors", "pt") as file:
            for key in file.keys():  # noqa: SIM118
                runner.model.load_weights([(key.removeprefix("base_model.model."), file.get_tensor(key))])
        finalize_layerwise_reload(runner.model, runner.model_config)
    llm.reset_prefix_cache()
    assert_equal(llm, models[second])


def assert_equal(llm, model) -> None:
    for ids, (tokens, table) in zip(PROMPTS, distributions(llm), strict=True):
        expected_tokens, expected_table = expected(model, ids)
        assert tokens == expected_tokens
        # As much as `test_vllm.py` allows vLLM's kernels.
        torch.testing.assert_close(table, expected_table, atol=4e-5 * float(expected_table.abs().max()), rtol=0)
