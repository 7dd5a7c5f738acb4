"""llama.cpp, as the wheel `xllamacpp` has it: another implementation, which reads GGUF files."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# Any token that is text on its own: a server reports probabilities with a token only once its text is complete.
_ASCII = 60


class LlamaCpp:
    """
    A model in llama.cpp's server, in float32 throughout where the file is.

    Args:
        loras: files of LoRAs.

    Raises:
        RuntimeError: it cannot load the file.
    """

    def __init__(self, file: Path, loras: Sequence[Path] = ()) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 256, 1, 1
        params.n_gpu_layers, params.warmup, params.verbosity = 0, False, -1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(lora), 1.0) for lora in loras]
        self.server = xllamacpp.Server(params)
        # A server that goes before its loop has begun is waited for without end; an answer shows that it has.
        self.server.handle_completions({"prompt": [0], "n_predict": 1})

    def log_probs(self, ids: list[int], vocab_size: int, last: int | None = None) -> torch.Tensor:
        """The log-probabilities of the token after each of `ids`, or of the `last` ones, [S, V]."""
        rows = torch.full((last or len(ids), vocab_size), torch.nan)
        for i, row in enumerate(rows, len(ids) - len(rows) + 1):
            settings = {"n_predict": 1, "n_probs": vocab_size, "cache_prompt": False, "logit_bias": [[_ASCII, 1000]]}
            answer = self.server.handle_completions({"prompt": ids[:i], **settings})
            for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
                if token["logprob"] is not None:  # what JSON has for NaN
                    row[token["id"]] = token["logprob"]
        return rows

    def tokens(self, text: str) -> list[int]:
        """The token ids of a text."""
        return self._post("tokenize", content=text, add_special=True, parse_special=True)["tokens"]

    def chat_tokens(self, messages: list[dict[str, str]]) -> list[int]:
        """The token ids of the prompt that the chat template makes of messages."""
        return self.tokens(self._post("apply-template", messages=messages)["prompt"])

    def _post(self, path: str, **values: Any) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.server.listening_address}/{path}", json.dumps(values).encode())
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)


def save_lora(file: Path, config: Any, seed: int, scale: float = 1.0) -> Path:
    """Write a random LoRA on the output projections of a Llama's attention. With a scale of 0 it changes nothing."""
    from gguf import GGUFWriter

    writer, drawn = GGUFWriter(file, "llama"), torch.Generator().manual_seed(seed)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    features = config.num_attention_heads * config.head_dim
    for i in range(config.num_hidden_layers):
        a, b = torch.randn(4, features, generator=drawn), torch.randn(config.hidden_size, 4, generator=drawn) * scale
        writer.add_tensor(f"blk.{i}.attn_output.weight.lora_a", a.numpy())
        writer.add_tensor(f"blk.{i}.attn_output.weight.lora_b", b.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


# --- tokenizers ------------------------------------------------------------------------------------------------------

TEXTS = [
    "Hello world, it's 12345 o'clock: we'LL see!",
    "  def f(x):\n\treturn x ** 2\n\n\n    # naïve café\r\n",
    "東京 is 1 of 2³ cities 🙂   ",
    "one<eos>two <eos> three",
]
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How families split text before merging: their pattern, or a first step; llama.cpp's name.
SPLITS = {
    "gpt-2": [],
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    "qwen2": [pre_tokenizers.Split(Regex(_WORDS + r"\p{N}" + _REST), "isolated")],
    "llama-bpe": [pre_tokenizers.Split(Regex(_WORDS + r"\p{N}{1,3}" + _REST), "isolated")],
    "dbrx": [pre_tokenizers.Split(Regex(_WORDS + r"\p{N}{1,3}" + _REST), "isolated")],
}


def letters() -> PreTrainedTokenizerFast:
    """Tokens of a model with 128 of them: every one is text."""
    chars = ["Ġ", "Ċ", *map(chr, range(33, 127))]
    vocab = {token: i for i, token in enumerate(["<eos>", *chars, *(f"a{char}" for char in "bcdefghijklmnopqrst")])}
    merges = [(token[0], token[1]) for token in vocab if len(token) == 2]
    return _saved(Tokenizer(models.BPE(vocab, merges)), [])


def bytes_tokenizer(split: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as of GPT-2 and what came after it, trained on `TEXTS`."""
    backend = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
    steps = [*SPLITS[split], pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in ("gpt-2", "smollm"))]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    return _saved(backend, steps)


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """BPE with bytes for unknown characters and a space before a text, as Llama 2's, trained on `TEXTS`."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE())
    trained.normalizer, trained.pre_tokenizer = normalizer, pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(TEXTS[:2] * 2, trainers.BpeTrainer(vocab_size=100))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "<eos>", *(f"<0x{i:02X}>" for i in range(256)), *model["vocab"]]
    vocab, merges = {token: i for i, token in enumerate(tokens)}, [tuple(merge) for merge in model["merges"]]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", bos_token="<s>", unk_token="<unk>")


def _saved(backend: Tokenizer, steps: list[Any]) -> PreTrainedTokenizerFast:
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps) if steps else pre_tokenizers.ByteLevel(False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")
