"""vLLM in this process: engines on tiny models, and what they compute. Only for an environment that has vLLM."""

from __future__ import annotations

import os
from pathlib import Path

import torch

# Before vLLM is imported: one process, one thread, little memory.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1",
)  # fmt: skip

from vllm import LLM, SamplingParams

SIZE = {"hidden_size": 128, "intermediate_size": 192}  # heads of 32, the smallest that vLLM's CPU kernels know
# What vLLM's CPU kernels need of each family: heads of 32. In transformers 5.19, SDPA leaves out Gemma 2's softcap.
KINDS: dict[str, dict] = {
    "llama": {"head_dim": 32, "mlp_bias": True}, "mistral": {}, "phi3": {"sliding_window": None}, "granite": {},
    "qwen2": {"use_sliding_window": False}, "qwen3": {"head_dim": 32}, "gemma": {"head_dim": 32}, "cohere": {},
    "gemma2": {
        "head_dim": 32, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0, "attn_implementation": "eager",
    },
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32}, "cohere2": {"head_dim": 32},
    "exaone4": {"head_dim": 32}, "glm4": {"head_dim": 32},
}  # fmt: skip
_start = torch.randint(3, 128, (20,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [_start[:3], _start, [*_start[:17], 5, 9, 7], _start[::-1] * 2, [4]]
NEW = 6
_running: list[LLM] = []


def engine(folder: str | Path, **options) -> LLM:
    """At most 16 tokens a step, so that prompts are computed in chunks, beside others' next tokens."""
    # The engine before, which a failed test keeps: collected later, it would take this one's process groups with it.
    while _running:
        _running.pop().llm_engine.engine_core.shutdown()
    options = {"dtype": "float32", "max_model_len": 64, "skip_tokenizer_init": True, "enforce_eager": True, **options}
    llm = LLM(
        model=str(folder), max_num_batched_tokens=16, max_num_seqs=4, max_logprobs=-1,
        enable_prefix_caching=True, enable_chunked_prefill=True, **options,
    )  # fmt: skip
    _running.append(llm)
    return llm


def distributions(llm: LLM, of_prompts: bool = True, lora=None):
    """For each prompt, its continuation, and log-probabilities of the whole vocabulary [prompt + 5, V]."""
    params = SamplingParams(
        temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=-1, prompt_logprobs=-1 if of_prompts else None,
        detokenize=False,
    )  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False, lora_request=lora)
    for output in outputs:
        steps = [*(output.prompt_logprobs or [])[1:], *output.outputs[0].logprobs]
        table = torch.tensor([[step[token].logprob for token in sorted(step)] for step in steps])
        yield list(output.outputs[0].token_ids), table


@torch.no_grad()
def expected(model, ids: list[int]):
    """The same by transformers and PEFT in float64, one prompt at a time and without a cache."""
    start = len(ids)
    for _ in range(NEW):
        logits = model(input_ids=torch.tensor([ids])).logits[0]
        ids = [*ids, int(logits[-1].argmax())]
    return ids[start:], logits.log_softmax(-1).float()
