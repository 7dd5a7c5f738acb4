"""
Export of a native MoE to one GGUF file, for llama.cpp and programs built on it (Ollama, LM Studio).

If llama.cpp would compute the model differently from transformers, an error names the difference.

Legend: n experts, f intermediate size, d hidden size.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.logging import tqdm

from ..utils.io import atomic_write, read_json
from ..utils.loading import check_tokenizer, read_tokenizer
from ..utils.messages import InputError, choice_error
from .expert_init import FFN
from .export import adapted_moe
from .families import INTERLEAVED, Content, MoEFamily, architecture, inexact, sliding_window
from .folders import MoELoraFolder, NativeFolder, WholeModel, expect, open_folder
from .formats import GGUF_TYPES
from .model_folder import EMBEDDINGS, GENERATION_CONFIG, HEAD
from .moe_config import backbone_shapes

logger = logging.getLogger(__name__)


def export_gguf(
    source: str | os.PathLike,
    output: str | os.PathLike,
    base: str | os.PathLike | None = None,
    *,
    family: str | None = None,
    dtype: str | None = None,
) -> Path:
    """
    Write a GGUF file, tensor by tensor, from a native MoE or from a MoE-LoRA adapter and its base model.

    Args:
        source: folder of an adapter, or of an upcycled, exported or pruned MoE.
        output: a new file.
        base, family: for an adapter, see `export_adapter`.
        dtype: dtype of the weights: `"float32"`, `"bfloat16"` or `"q8_0"`; None takes bfloat16 for a bfloat16 model,
            otherwise float32. Gates, norms and biases are float32.

    Returns:
        the file.

    Raises:
        ValueError: llama.cpp would compute or tokenize differently from the model. The message names the difference,
            and nothing is written.
    """
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    if dtype is not None and dtype not in GGUF_TYPES:
        raise InputError(choice_error("dtype", dtype, GGUF_TYPES))
    output = Path(output).expanduser()
    if os.path.lexists(output):
        raise InputError(f"output={str(output)!r}: already exists; choose another")
    # Open the tensors, and the folders of the tokenizer and generation config.
    folder = open_folder(source, "model", MoELoraFolder, NativeFolder, base=base)
    content: Content
    if isinstance(folder, MoELoraFolder):
        content, config = adapted_moe(folder, family)
        model: WholeModel = content.dense
        moe_family, tokenizer_folder = content.dense.moe, (folder if folder.has_tokenizer else model).folder
    else:
        content = model = expect(folder, NativeFolder)
        config, moe_family, tokenizer_folder = model.config, model.family, model.folder
    moe = _MoE(moe_family, config, content, os.fspath(source))
    dtype = dtype or ("bfloat16" if model.dtype == torch.bfloat16 else "float32")
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(output) as unfinished:
        writer = GGUFWriter(unfinished, moe.architecture)
        tokenizer = read_tokenizer(tokenizer_folder, name := str(tokenizer_folder))
        writer.add_name(_model_name(output.stem, tokenizer, name))
        writer.add_quantization_version(2)
        moe.add_settings(writer)
        _add_tokenizer(writer, tokenizer, name, model.folder / GENERATION_CONFIG, config)
        # Write the names, shapes and types of all tensors, then the bytes of each.
        tensors, kinds = list(moe.tensors()), []
        for tensor in tensors:
            is_small = len(tensor.shape) == 1 or "_inp" in tensor.name  # norms, biases and gates
            kind = GGMLQuantizationType["F32" if is_small else GGUF_TYPES[dtype]]
            if tensor.shape[-1] % GGML_QUANT_SIZES[kind][0]:  # q8_0 has blocks of 32
                kind = GGMLQuantizationType.BF16
            block, size = GGML_QUANT_SIZES[kind]
            kinds.append(kind)
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), tensor.shape.numel() // block * size, kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor, kind in zip(tqdm(tensors, desc="tensors"), kinds, strict=True):
            data = tensor.read().float()
            if data.shape != tensor.shape:
                raise InputError(f"{source}: {tensor.name} is {list(data.shape)}, its config says {list(tensor.shape)}")
            writer.write_tensor_data(quantize(data.contiguous().numpy(), kind))
        writer.close()
    return output


# --- tensors and settings --------------------------------------------------------------------------------------------

# Name on disk → name in GGUF. In a layer, only the part after the layer's number.
_NAMES = {
    EMBEDDINGS: "token_embd.weight", "model.norm.weight": "output_norm.weight", HEAD: "output.weight",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


class _Tensor(NamedTuple):
    name: str
    shape: torch.Size
    read: Callable[[], torch.Tensor]


class _MoE:
    """A native MoE with the names and layouts of llama.cpp."""

    def __init__(self, family: MoEFamily, config: PreTrainedConfig, content: Content, name: str) -> None:
        self.family, self.config, self.content = family, config, content
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.rope: dict[str, Any] = config.rope_parameters
        self.layers = range(config.num_hidden_layers)
        self.architecture = architecture(config)
        self._experts = lru_cache(1)(self._stacked)  # its three tensors are written one after the other
        reason = inexact(config, False).get("llama.cpp")  # such as layers without experts, which have no shared experts
        if reason is None and family.shared is not None:
            has_shared = any(content.shared(layer).down.any() for layer in self.layers)
            reason = inexact(config, has_shared).get("llama.cpp")
        if reason is not None:
            raise InputError(f"{name}: llama.cpp does not compute this: {reason}")

    def add_settings(self, writer: Any) -> None:
        """Write the settings that llama.cpp reads."""
        c, width = self.config, getattr(self.config, self.family.width)
        if window := sliding_window(c):
            logger.warning(f"llama.cpp ignores sliding windows, so the file allows texts of {window} tokens at most")
        writer.add_context_length(window or c.max_position_embeddings)
        writer.add_vocab_size(c.vocab_size)
        writer.add_embedding_length(c.hidden_size)
        writer.add_block_count(c.num_hidden_layers)
        writer.add_head_count(c.num_attention_heads)
        writer.add_head_count_kv(c.num_key_value_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_rope_freq_base(self.rope["rope_theta"])
        writer.add_layer_norm_rms_eps(c.rms_norm_eps)
        writer.add_expert_count(getattr(c, self.family.count))
        writer.add_expert_used_count(c.num_experts_per_tok)
        writer.add_feed_forward_length(width)
        if self.architecture not in INTERLEAVED:
            writer.add_expert_feed_forward_length(width)
        if self.architecture == "qwen2moe":
            writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
        if self.architecture == "granitemoe":
            writer.add_embedding_scale(c.embedding_multiplier)
            writer.add_residual_scale(c.residual_multiplier)
            writer.add_attention_scale(c.attention_multiplier)
            writer.add_logit_scale(c.logits_scaling)

    def tensors(self) -> Iterator[_Tensor]:
        """Yield every tensor of the file. A tensor is read only when asked for."""
        c, d = self.config, self.config.hidden_size
        n, f = getattr(c, self.family.count), getattr(c, self.family.width)
        if self.rope["rope_type"] != "default":
            yield _Tensor("rope_freqs.weight", torch.Size((self.head_dim // 2,)), self._rope_factors)
        for name, shape in backbone_shapes(c).items():
            if match := _LAYER.fullmatch(name):
                renamed = f"blk.{match[1]}.{_NAMES[match[2]]}.{match[3]}"
                yield _Tensor(renamed, shape, partial(self._in_layer, name, match[2]))
            else:
                yield _Tensor(_NAMES[name], shape, partial(self.content.backbone, name))
        for layer in self.layers:
            start = f"blk.{layer}.ffn_"
            yield _Tensor(f"{start}gate_inp.weight", torch.Size((n, d)), partial(self.content.router, layer))
            for part, sizes in (("gate", (n, f, d)), ("up", (n, f, d)), ("down", (n, d, f))):
                yield _Tensor(f"{start}{part}_exps.weight", torch.Size(sizes), partial(self._expert_part, layer, part))
            if self.architecture == "qwen2moe":
                width = c.shared_expert_intermediate_size
                for part, of_shared in (("gate", (width, d)), ("up", (width, d)), ("down", (d, width))):
                    read = partial(self._shared, layer, part)
                    yield _Tensor(f"{start}{part}_shexp.weight", torch.Size(of_shared), read)
                yield _Tensor(f"{start}gate_inp_shexp.weight", torch.Size((d,)), partial(self._shared_gate, layer))

    def _in_layer(self, name: str, module: str) -> torch.Tensor:
        """
        Read a layer's tensor outside of the experts. For queries and keys, reorder each head's dimensions for rotation.
        """
        tensor = self.content.backbone(name)
        heads = {
            "self_attn.q_proj": self.config.num_attention_heads, "self_attn.k_proj": self.config.num_key_value_heads
        }.get(module)  # fmt: skip
        if heads is None or self.architecture not in INTERLEAVED:
            return tensor
        return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    def _stacked(self, layer: int) -> FFN:
        return FFN(*map(torch.stack, zip(*self.content.experts(layer), strict=True)))

    def _expert_part(self, layer: int, part: str) -> torch.Tensor:
        return getattr(self._experts(layer), part)

    def _shared(self, layer: int, part: str) -> torch.Tensor:
        return getattr(self.content.shared(layer), part)

    def _shared_gate(self, layer: int) -> torch.Tensor:
        if not self.content.shared(layer).down.any():  # any gate but 0, which gives NaN in llama.cpp
            return torch.ones(self.config.hidden_size)
        return self.content.backbone(self.family.shared_gate_name(layer)).flatten()

    def _rope_factors(self) -> torch.Tensor:
        """Return the divisors of the rotation frequencies in llama.cpp, [head_dim / 2]."""
        scaled, _ = ROPE_INIT_FUNCTIONS[self.rope["rope_type"]](self.config, torch.device("cpu"))
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        return 1 / (self.rope["rope_theta"] ** exponents) / scaled


# --- tokenizer -------------------------------------------------------------------------------------------------------

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Splits of a byte-level tokenizer before merging, and whether words in its vocabulary stay whole → llama.cpp's name.
_PRE_TOKENIZERS = {
    (("bytes",), False): "gpt-2",
    (("digits", "bytes"), False): "smollm",  # also Granite
    ((_CONTRACTIONS + r"\p{N}" + _REST,), False): "qwen2",
    ((_CONTRACTIONS + r"\p{N}{1,3}" + _REST,), True): "llama-bpe",
    ((_CONTRACTIONS + r"\p{N}{1,3}" + _REST,), False): "dbrx",  # also Phi-4
}


def _add_tokenizer(writer: Any, tokenizer: Any, name: str, generation: Path, config: PreTrainedConfig) -> None:
    """Write the tokenizer."""
    from gguf import TokenType

    check_tokenizer(tokenizer, config, name)
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if hasattr(tokenizer, "backend_tokenizer") else {}
    model = backend.get("model", {})
    if model.get("type") != "BPE":
        raise InputError(f"{name}: its tokenizer is {model.get('type')}; llama.cpp needs BPE")
    added = {token["id"]: token for token in backend["added_tokens"]}
    vocab = {index: token for token, index in tokenizer.get_vocab().items()}
    tokens = [vocab.get(i, f"[PAD{i}]") for i in range(config.vocab_size)]
    types = [
        (TokenType.CONTROL if added[i]["special"] else TokenType.USER_DEFINED) if i in added
        else TokenType.NORMAL if i in vocab else TokenType.UNUSED
        for i in range(config.vocab_size)
    ]  # fmt: skip
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if model["byte_fallback"]:  # from SentencePiece
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        for token in added.values():
            if token["normalized"] and not token["special"] and backend["normalizer"]:
                raise InputError(
                    f"{name}: its tokenizer finds {token['content']!r} only where a word begins, llama.cpp anywhere; "
                    f"add it as AddedToken({token['content']!r}, normalized=False)"
                )
        writer.add_add_space_prefix(_adds_space(tokenizer, backend, name))
        # Score a token by its first merge. Tokens without a merge get the lowest score.
        scores: dict[str, float] = {}
        for rank, (left, right) in enumerate(merges):
            scores.setdefault(left + right, -float(rank))
        writer.add_token_scores([scores.get(token, -float(len(merges))) for token in tokens])
        types = [
            TokenType.BYTE if re.fullmatch("<0x[0-9A-F]{2}>", token) else type_
            for token, type_ in zip(tokens, types, strict=True)
        ]
        if tokenizer.unk_token_id is not None:
            types[tokenizer.unk_token_id] = TokenType.UNKNOWN
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer(backend, name))
        writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    # Write the special tokens, and whether texts begin with BOS and end with EOS.
    for kind in ("bos", "eos", "unk", "pad"):
        if (token := getattr(tokenizer, f"{kind}_token_id")) is not None:
            getattr(writer, f"add_{kind}_token_id")(token)
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(ids[-1] == tokenizer.eos_token_id)
    ends = (read_json(generation) if generation.is_file() else {}).get("eos_token_id")
    others = [end for end in (ends if isinstance(ends, list) else [ends]) if end not in (None, tokenizer.eos_token_id)]
    if others:  # llama.cpp has one more field, and knows further ones by text
        writer.add_eot_token_id(others[0])
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    if template:
        writer.add_chat_template(template)


def _model_name(stem: str, tokenizer: Any, name: str) -> str:
    """
    Return the model's name. If the name contains "phi-3", llama.cpp strips spaces after all special tokens but three.
    """
    tokens = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    stripped = {name for name, token in tokens.items() if token.rstrip}
    odd = [name for name, token in tokens.items() if token.lstrip or token.single_word]
    kept = {"<unk>", "<s>", "<|endoftext|>"}
    as_phi = "</s>" in stripped == tokens.keys() - kept and kept <= tokenizer.get_vocab().keys()
    if odd or (stripped and not as_phi):
        token = sorted(odd or stripped)[0]
        raise InputError(f"{name}: its tokenizer takes spaces beside {token!r} away; llama.cpp does not")
    if as_phi:
        return stem if re.search("phi-?3", stem, re.IGNORECASE) else f"{stem} (phi-3)"
    return re.sub("phi-?3", "phi", stem, flags=re.IGNORECASE)


def _pre_tokenizer(backend: dict[str, Any], name: str) -> str:
    """Return llama.cpp's name for a byte-level tokenizer's way to split text."""
    pre = backend["pre_tokenizer"] or {}
    steps: list[Any] = []
    for step in pre.get("pretokenizers", [pre]):
        if step.get("type") == "ByteLevel" and not step["add_prefix_space"]:
            steps += ["bytes"] if step["use_regex"] else []
        elif step.get("type") == "Digits" and step["individual_digits"]:
            steps.append("digits")
        elif step.get("type") == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            steps.append(step["pattern"].get("Regex"))
        else:
            steps.append(None)
    pre_tokenizer = _PRE_TOKENIZERS.get((tuple(steps), bool(backend["model"]["ignore_merges"])))
    if pre_tokenizer is None or (backend["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        raise InputError(f"{name}: llama.cpp has no name for how its tokenizer splits text ({json.dumps(pre)[:120]})")
    return pre_tokenizer


def _adds_space(tokenizer: Any, backend: dict[str, Any], name: str) -> bool:
    """
    Return whether llama.cpp must put a space before a text, and before text after a special token.

    transformers converts Llama's tokenizers to `Metaspace`. It adds no space to a text that begins with a space nor,
    with the scheme "first", after special tokens. llama.cpp has a name for neither rule, so the chat template decides.
    """
    pre, normalizer = backend["pre_tokenizer"] or {}, backend["normalizer"] or {}
    steps = [step["type"] for step in normalizer.get("normalizers", [normalizer] if normalizer else [])]
    if not pre and steps in (["Prepend", "Replace"], ["Replace"]):
        return "Prepend" in steps
    if pre.get("type") == "Metaspace" and not steps:
        if pre["prepend_scheme"] == "never":
            return False
        exact = [adds for adds in (True, False) if _is_chat_exact(tokenizer, adds)]
        texts = "chats" if tokenizer.chat_template else "texts that begin with no space"
        logger.warning(
            "the tokenizer puts a space before a text that begins with none%s, llama.cpp before %s text: %s have %s",
            ", but after no special token" if pre["prepend_scheme"] == "first" else "",
            "no" if exact == [False] else "any",
            texts,
            "the same tokens, others may not" if exact else "other tokens",
        )
        return exact != [False]
    raise InputError(f"{name}: llama.cpp has no name for how its tokenizer splits text ({json.dumps(pre)[:120]})")


_CHAT = [{"role": role, "content": "Hi there"} for role in ("user", "assistant", "user")]


def _is_chat_exact(tokenizer: Any, adds_space: bool) -> bool:
    """Return whether llama.cpp tokenizes a chat as the tokenizer does. Without a chat template, test a plain text."""
    text = "Hi there"
    if tokenizer.chat_template:
        try:
            text = tokenizer.apply_chat_template(_CHAT, tokenize=False, add_generation_prompt=True)
        except Exception:  # raised by the template for a chat of three turns
            return False
    plain = copy.deepcopy(tokenizer.backend_tokenizer)
    plain.pre_tokenizer.prepend_scheme = "never"
    added = {token.content: (i, token.rstrip) for i, token in tokenizer.added_tokens_decoder.items()}
    ids, takes_spaces = [], False  # whether the previous token strips spaces
    for part in re.split(f"({'|'.join(map(re.escape, sorted(added, key=len, reverse=True)))})", text):
        if part in added:
            token, takes_spaces = added[part]
            ids.append(token)
        elif part := part.lstrip() if takes_spaces else part:
            ids += plain.encode(" " * adds_space + part, add_special_tokens=False).ids
    return ids == tokenizer(text, add_special_tokens=False)["input_ids"]
