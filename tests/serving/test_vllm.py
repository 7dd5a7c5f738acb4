"""
vLLM serves adapters' folders as transformers and PEFT compute them: complete distributions of prompts and of what is
generated, with mixed lengths in one batch, prompts in chunks, and cached prefixes. `make test-vllm` runs this file.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_peft import MoELoraConfig
from tests.helpers.native_case import adapter, dense_model, saved

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM has an environment of its own", allow_module_level=True)

from openai import OpenAI
from vllm import SamplingParams

from benchmarks.pick import vllm_server
from benchmarks.tracing import Trace
from examples.demo.smollm2 import smollm2_folder
from moe_peft.serving.vllm_layers import VllmMoELoraLinears
from tests.helpers.vllm_case import KINDS, NEW, PROMPTS, SIZE, distributions, engine, expected

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LORA_ON_ATTENTION = {"target_modules": ["mlp", *ATTENTION], "num_experts_pattern": dict.fromkeys(ATTENTION, 1)}


def assert_equal(outputs, reference, steps: int = 0, rounding: float = 1e-5) -> None:
    """Tokens, and log-probabilities up to float32's rounding of logits as large as the smallest of them."""
    for (tokens, table), (expected_tokens, expected_table) in zip(outputs, reference, strict=True):
        assert tokens == expected_tokens
        atol = rounding * float(expected_table.abs().max())
        torch.testing.assert_close(table, expected_table[-steps:], atol=atol, rtol=0)


@torch.no_grad()
def rounding_of(model) -> float:
    """Four times what float32 rounds in PEFT's own log-probabilities, by the largest; it then computes in float64."""

    def tables(model) -> list[torch.Tensor]:
        return [model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1) for ids in PROMPTS]

    single, exact = tables(model), tables(model.double())
    own = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(single, exact, strict=True))
    return max(4e-5, 4 * own)


SWITCH = {"router_type": "switch", "top_k": 1, "mixing": "projection"}
CASES = {
    "llama": {"mixing": "output", "num_shared_experts": 2, "router_bias_update_rate": 0.05},
    "llama-projection": {"mixing": "projection", "router_type": "mlp", "use_rslora": True, "lora_alpha": 4},
    "llama-top-1": {"top_k": 1, "router_type": "attention", "layers_to_transform": [1], "rank_pattern": {"1.mlp": 2}},
    "mistral": {"normalize_top_k": False, "target_projections": ["down_proj", "up_proj"], "router_type": "sigmoid",
                "num_shared_experts": 1},
    "mistral-switch": {"num_experts_pattern": {"0.mlp": 1}, **SWITCH},
    "qwen2": {"expert_type": "hydra_lora", "router_type": "top_p", "top_k": 3},
    "qwen3": {"expert_type": "bottleneck", "bottleneck_size": 8, "normalize_top_k": False},
    "qwen3-many": {"num_experts": 40, "top_k": 5, "modules_to_save": ["norm"]},
    "llama-base": {"base_expert": True},
    "qwen3-base": {"base_expert": True, "mixing": "projection", "top_k": 1, "target_modules": ["mlp", "q_proj"]},
    # Experts, and LoRAs, on attention and on single linears, beside FFNs with experts or by themselves.
    "llama-attention": {"target_modules": ["mlp", *ATTENTION], "num_shared_experts": 1},
    "mistral-lora": LORA_ON_ATTENTION,
    "qwen2-queries": {"target_modules": ["q_proj", "v_proj"], "router_type": "mlp"},
    "qwen3-linears": {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"], "top_k": 1},
    "llama-parts": {"target_modules": ["k_proj", "o_proj", "down_proj"], "num_experts": 40, "top_k": 5},
    "phi3": {"target_modules": ["mlp", "qkv_proj", "o_proj"]},
    "phi3-linears": {"target_modules": ["gate_up_proj", "down_proj"]},
    "glm4": LORA_ON_ATTENTION,
    **dict.fromkeys(["gemma", "gemma2", "gemma3_text", "granite", "cohere", "cohere2", "exaone4"], LORA_ON_ATTENTION),
    "llama-tokens": {"trainable_token_indices": [5, 9, 7]},
    "qwen3-tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_are_those_of_peft(tmp_path, case):
    kind = case.partition("-")[0]
    base = dense_model(kind, **SIZE, **KINDS[kind])
    name = saved(base, tmp_path / "base")
    model = adapter(base, tmp_path / "adapter", name, **CASES[case])
    rounding = rounding_of(model)
    llm = engine(tmp_path / "adapter")
    reference = [expected(model, ids) for ids in PROMPTS]
    assert_equal(distributions(llm), reference, rounding=rounding)
    # Again, with prefixes from the cache; vLLM reads none where it returns a prompt's log-probabilities.
    assert_equal(distributions(llm, of_prompts=False), reference, NEW, rounding)
    with torch.no_grad(), model.disable_adapter():  # the adapter counts
        difference = model(input_ids=torch.tensor([PROMPTS[1]])).logits[0].log_softmax(-1) - reference[1][1][:20]
    assert difference.abs().max() > 0.05 * reference[1][1].abs().max()


def test_compilers_take_the_experts_as_one_operator(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # traces the model, but runs the graph as it is
    base = dense_model("llama", **SIZE, **KINDS["llama"])
    model = adapter(base, tmp_path / "adapter", saved(base, tmp_path / "base")).double()
    outputs = distributions(engine(tmp_path / "adapter", enforce_eager=False))
    assert_equal(outputs, [expected(model, ids) for ids in PROMPTS])


# Cohere's layers add up the outputs of FFN and attention at once; "qwen3" has bottlenecks.
@pytest.mark.parametrize(
    ("kind", "case"), [("mistral", "mistral"), ("mistral", "qwen3-linears"), ("cohere", "cohere"), ("cohere2", "qwen3")]
)
def test_two_processes_of_tensor_parallelism_compute_the_same(tmp_path, kind, case):
    base = dense_model(kind, **SIZE, **KINDS[kind])
    name = saved(base, tmp_path / "base")
    model = adapter(base, tmp_path / "adapter", name, **CASES[case])
    rounding = rounding_of(model)
    # In vLLM's own words, without the plugin's change to its arguments.
    llm = engine(name, hf_overrides=overrides(base, tmp_path / "adapter"), tensor_parallel_size=2)
    assert_equal(distributions(llm), [expected(model, ids) for ids in PROMPTS], rounding=rounding)


def overrides(base, folder) -> dict:
    (architecture,) = base.config.architectures
    return {"architectures": [f"MoELora{architecture}"], "moe_lora_adapter": str(folder)}


@pytest.mark.parametrize("settings", [{"modules_to_save": ["norm"]}, {"trainable_token_indices": [5, 9, 7]}], ids=str)
def test_weights_that_are_loaded_again_are_the_adapters(tmp_path, settings):
    """As after a sleep that drops them."""
    base = dense_model("llama", **SIZE, **KINDS["llama"])
    model = adapter(base, tmp_path / "adapter", saved(base, tmp_path / "base"), **settings).double()
    llm = engine(tmp_path / "adapter")
    with torch.no_grad():
        for host in llm.llm_engine.model_executor.driver_worker.model_runner.model.expert_tensors.values():
            host[1].own.zero_()
    llm.collective_rpc("reload_weights")
    assert_equal(distributions(llm), [expected(model, ids) for ids in PROMPTS])


def test_compiled_models_are_kept_by_what_has_experts(tmp_path):
    """vLLM finds them by a hash of its configs, and a folder may hold another adapter by now."""
    from vllm.engine.arg_utils import EngineArgs

    base = dense_model("llama", **SIZE, **KINDS["llama"])
    name, folder = saved(base, tmp_path / "base"), tmp_path / "adapter"
    hashes = []
    for targets in (["mlp"], ["mlp", "q_proj"], ["mlp"]):
        adapter(AutoModelForCausalLM.from_pretrained(name), folder, name, target_modules=targets)
        config = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=64).create_engine_config()
        hashes.append(config.model_config.compute_hash())
    assert hashes[0] == hashes[2] != hashes[1]


def test_experts_of_linears_wait_for_nothing_at_any_number_of_tokens(tmp_path):
    """Shapes that values decide, or waits for the device, would keep CUDA graphs from being captured."""
    base = dense_model("llama", **SIZE, **KINDS["llama"])
    adapter(base, tmp_path / "adapter", saved(base, tmp_path / "base"), **CASES["llama-attention"])
    llm = engine(tmp_path / "adapter")
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    routed = [module.to("meta") for module in model.modules() if isinstance(module, VllmMoELoraLinears)]
    assert len(routed) == 4
    for linears in routed:
        d = next(iter(linears.hosts[0].moe_lora_A.values())).shape[-1]
        for tokens in (1, 8, 40, 300):
            y, x = (torch.empty(tokens, width, device="meta") for width in (sum(linears.widths), d))
            with Trace() as seen:
                linears.add_to(y, x)
            assert seen.operations and not seen.waits


TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Photosynthesis is the process by which plants turn light into chemical energy. It takes place in chloroplasts, "
    "which hold chlorophyll, and it needs water and carbon dioxide. Its products are sugar and",
    "Question: A train leaves at nine and arrives at half past eleven. How long does it travel?\nAnswer:",
]


@pytest.fixture(scope="module", params=["output", "projection"])
def smollm2(request, tmp_path_factory):
    """An adapter with experts as large as training makes them, on SmolLM2-135M, and its prompts' token ids."""
    name = str(smollm2_folder())
    torch.manual_seed(0)
    config = MoELoraConfig(mixing=request.param, r=8, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "moe_lora_B" in key or "moe_lora_router" in key:
                parameter.normal_(std=0.05)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(name)
    return folder, model, [tokenizer(text)["input_ids"] for text in TEXTS]


@torch.no_grad()
def of_tokens(model, ids: list[int]) -> torch.Tensor:
    """The log-probabilities of a prompt's own tokens."""
    table = model(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    return table.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)


def served(folder: Path, prompts: list[list[int]], dtype: str):
    params = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=0, ignore_eos=True, detokenize=False)
    llm = engine(folder, dtype=dtype, max_model_len=128)
    for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False):
        steps = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        yield list(output.outputs[0].token_ids), torch.tensor([step[token].logprob for step, token in steps])


def test_smollm2_continues_and_scores_texts_as_with_peft(smollm2):
    folder, model, prompts = smollm2
    for ids, (tokens, scores) in zip(prompts, served(folder, prompts, "float32"), strict=True):
        # Two float32 engines of a model of 30 layers.
        torch.testing.assert_close(scores, of_tokens(model, ids), atol=1e-3, rtol=0)
        generated = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert tokens == generated[0, len(ids) :].tolist()


def test_smollm2_in_bfloat16_is_as_near_to_float32_as_with_peft(smollm2):
    folder, model, prompts = smollm2
    exact = torch.cat([of_tokens(model, ids) for ids in prompts])
    scores = torch.cat([scores for _, scores in served(folder, prompts, "bfloat16")])
    base = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.bfloat16)
    half = PeftModel.from_pretrained(base, folder).eval()
    expected_error = (torch.cat([of_tokens(half, ids) for ids in prompts]) - exact).abs().mean()
    assert (scores - exact).abs().mean() < 1.5 * expected_error < 0.2


@pytest.mark.parametrize("smollm2", ["projection"], indirect=True)
def test_vllm_serve_answers_a_client_as_peft_does(smollm2):
    folder, model, _ = smollm2
    with vllm_server(folder, {}, "--dtype", "float32", "--max-model-len", "128") as server:
        client = OpenAI(base_url=f"{server}/v1", api_key="none")
        (served_model,) = client.models.list().data
        chat = [{"role": "user", "content": "Write the date March 5, 1999 in ISO format."}]
        answer = client.chat.completions.create(
            model=served_model.id, messages=chat, temperature=0, max_tokens=12, logprobs=True
        ).choices[0]
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generated = model.generate(**ids, max_new_tokens=12, do_sample=False)[0]
    new = generated[ids["input_ids"].shape[1] :]
    assert answer.message.content == tokenizer.decode(new, skip_special_tokens=True)
    scores = torch.tensor([token.logprob for token in answer.logprobs.content])  # two float32 engines, as above
    torch.testing.assert_close(scores, of_tokens(model, generated.tolist())[-len(new) :], atol=1e-3, rtol=0)


# --- what is refused, in one line ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"router_type": "hash", "router_aux_loss_coef": 0.0},
            "router_type='hash': vLLM's layers do not see token ids",
        ),
        (
            {"target_modules": ["mlp", "lm_head"], "num_experts_pattern": {"lm_head": 1}},
            "lm_head has LoRAs, but vLLM serves LoRAs only on FFNs and on linears of FFNs",
        ),
        (
            {"modules_to_save": ["embed_tokens"]},
            "embed_tokens.* was trained, but the base ties it to another",
        ),
    ],
)
def test_adapters_that_vllm_cannot_serve(tmp_path, settings, message):
    base = dense_model("llama", **SIZE, head_dim=32, tie_word_embeddings="embed_tokens" in message)
    name = saved(base, tmp_path / "base")
    adapter(base, tmp_path / "adapter", name, **settings)
    with pytest.raises(ValueError, match=message):
        engine(tmp_path / "adapter")
    with pytest.raises(ValueError, match=message):  # in vLLM's own words
        engine(name, hf_overrides=overrides(base, tmp_path / "adapter"))


def test_vllms_loras_beside_a_mixture(tmp_path):
    base = dense_model("llama", **SIZE, head_dim=32)
    name = saved(base, tmp_path / "base")
    adapter(base, tmp_path / "adapter", name)
    own_words = {"hf_overrides": overrides(base, tmp_path / "adapter")}
    for folder, options in ((tmp_path / "adapter", {}), (name, own_words)):
        with pytest.raises(ValueError, match=r"^enable_lora: vLLM's LoRAs would replace linears that have experts"):
            engine(folder, enable_lora=True, **options)


@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_embeddings_that_were_resized(settings, tmp_path):
    base = dense_model("llama", **SIZE, head_dim=32)
    name = saved(base, tmp_path / "base")
    base.resize_token_embeddings(base.config.vocab_size + 4, mean_resizing=False)
    adapter(base, tmp_path / "adapter", name, **settings).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="tokens were added to the base; export it with `moe-peft export`"):
        engine(tmp_path / "adapter")


def test_bases_whose_architecture_has_no_experts_in_vllm(tmp_path):
    base = dense_model("olmo2", **SIZE)
    adapter(base, tmp_path / "adapter", saved(base, tmp_path / "base"))
    with pytest.raises(ValueError, match=r"its base is a Olmo2ForCausalLM, .*; export it with `moe-peft export`"):
        engine(tmp_path / "adapter")


def test_adapter_on_another_base(tmp_path):
    base = dense_model("llama", **SIZE, head_dim=32)
    adapter(base, tmp_path / "adapter", saved(dense_model("llama", hidden_size=64, head_dim=32), tmp_path / "other"))
    with pytest.raises(ValueError, match=r"moe_lora_A.down_proj is \[4, 4, 192\], its config says \[4, 4, 48\]"):
        engine(tmp_path / "adapter")
