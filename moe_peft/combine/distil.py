"""
Distils several LoRAs of one base into one LoRA: each LoRA answers prompts of its kind, the base answers general
requests, and one new LoRA is trained on these answers. Right answers are not needed.

Every fifth row of the training is a general request with the base's answer, so that the new LoRA keeps what the base
does elsewhere. Answers are tokens as the teachers gave them: one that was cut at its longest has no end to learn.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedTokenizerBase, set_seed
from trl import SFTConfig, SFTTrainer

from ..adapter.lora_conversion import Adapter, PlainLora, lora_scaling, read_loras
from ..models.introspection import end_tokens
from ..training.answers import AnswersFile, KeptAnswer, Tokens, answers_in_batches, base_digest
from ..training.checkpointing import hash_value
from ..training.data import IGNORED
from ..utils.distributed import on_main_process
from ..utils.messages import InputError
from .regmean import with_lora
from .request_texts import Request, check_requests, neutral_requests

logger = logging.getLogger("moe_peft")

RANK, LEARNING_RATE = 16, 1e-3
ROWS_PER_STEP = 10
ANSWERED_AT_ONCE = 4  # as many times the rows of a pass of the training, which needs more memory
_FIFTH = 5  # every fifth row is a general request


def distil(
    model: nn.Module,
    adapters: Sequence[Adapter],
    prompts: Sequence[Sequence[Request]],
    tokenizer: PreTrainedTokenizerBase,
    general: Sequence[Request] | None = None,
    *,
    steps: int = 120,
    rank: int = RANK,
    learning_rate: float = LEARNING_RATE,
    max_new_tokens: int = 64,
    max_length: int = 1024,
    batch_size: int = 8,
    seed: int = 0,
    answers: str | os.PathLike | None = None,
) -> PeftModel:
    """
    Train one LoRA on what several LoRAs of one base answer.

    Args:
        model: the adapters' base, full precision or quantized; it gets the new LoRA.
        adapters: n LoRA adapters: folders, PEFT models, or pairs of config and tensors. Ranks, scalings and adapted
            linears may differ. The new LoRA is on all linears that one of them adapts.
        prompts: for each adapter, requests of its kind, without answers: texts, or chats that end with the user's
            message. Give dozens, better hundreds.
        tokenizer: the base's.
        general: requests that the base answers; None: the built-in list. A fifth of the training's rows are of these.
        steps: training steps of 10 rows. Each row has the same weight, however long its answer.
        rank: rank of the new LoRA.
        learning_rate: the highest rate; it decays to 0 (cosine).
        max_new_tokens: tokens of an answer at most.
        max_length: tokens of a prompt at most; longer prompts are left out.
        batch_size: rows per forward pass of the training. Four times as many prompts are answered at once.
        seed: seed of the new LoRA and of the order of rows.
        answers: a JSONL file that keeps the answers. Answers that are in it already are not made again.

    Returns:
        the base with a LoRA of rank `rank`. It saves, merges and serves like any other LoRA.

    Raises:
        ValueError: an adapter has no prompts, or has other parts than LoRAs on linears.

    Example:

    ```python
    >>> from peft import LoraConfig, get_peft_model
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from moe_peft import distil
    >>> for name in ("math", "code"):
    ...     base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    ...     lora = get_peft_model(
    ...         base, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    ...     )
    ...     lora.save_pretrained(name)
    >>> base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    >>> tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
    >>> prompts = [["What is 3 + 4?"], ["Write a loop in Python."]]
    >>> model = distil(
    ...     base,
    ...     ["math", "code"],
    ...     prompts,
    ...     tokenizer,
    ...     ["Hello!"],
    ...     steps=2,
    ...     max_new_tokens=4,
    ... )
    >>> model.save_pretrained("math-and-code")
    ```
    """
    if len(prompts) != len(adapters):
        raise InputError(f"distil: prompts: are for {len(prompts)} adapters of {len(adapters)}; give a list for each")
    for requests in prompts:
        check_requests(requests, "distil: prompts")
    is_chat = any(not isinstance(request, str) for of_adapter in prompts for request in of_adapter)
    if general is None:
        general = general_requests(neutral_requests(), is_chat)
    asked = [[prompt_tokens(tokenizer, request) for request in of_one] for of_one in (*prompts, general)]
    *own, of_base = [short_prompts(of_one, max_length) for of_one in asked]
    file = AnswersFile(None if answers is None else Path(answers))
    teachers = Teachers(model, adapters, tokenizer, max_new_tokens, ANSWERED_AT_ONCE * batch_size, file)
    rows = teachers.rows(with_general(own, of_base, seed))
    return fitted(model, teachers.loras, rows, tokenizer, steps, rank, learning_rate, batch_size, seed)


# --- prompts ---------------------------------------------------------------------------------------------------------


def prompt_tokens(
    tokenizer: Any, request: Request, tools: Any = None, template_settings: Mapping[str, Any] | None = None
) -> Tokens:
    """Return the tokens before an answer. A chat is written by the tokenizer's template."""
    if isinstance(request, str):
        return tokenizer(request)["input_ids"]
    tools = json.loads(tools) if isinstance(tools, str) else tools
    return tokenizer.apply_chat_template(
        list(request), tools=tools, add_generation_prompt=True, return_dict=True, **(template_settings or {})
    )["input_ids"]


def general_requests(texts: Sequence[str], is_chat: bool) -> list[Request]:
    """Return general requests in the form of the adapters' prompts: chats or texts."""
    return [[{"role": "user", "content": text}] for text in texts] if is_chat else list(texts)


def short_prompts(prompts: Sequence[Tokens], max_length: int) -> list[Tokens]:
    """Leave out prompts of more than `max_length` tokens, with a warning."""
    short = [ids for ids in prompts if len(ids) <= max_length]
    if left := len(prompts) - len(short):
        logger.warning("max_length=%d: %d of %d prompts are longer and are left out", max_length, left, len(prompts))
    return short


def with_general(prompts: Sequence[list[Tokens]], general: list[Tokens], seed: int) -> list[list[Tokens]]:
    """Add general prompts to each adapter's prompts: a fifth of all, or all general prompts if there are fewer."""
    count = -(-sum(map(len, prompts)) // (_FIFTH - 1))
    return [*prompts, random.Random(seed).sample(general, min(len(general), count))]


# --- answers ---------------------------------------------------------------------------------------------------------


class Teachers:
    """
    LoRAs of one base, and (index n) the base alone, which answer prompts greedily.

    Args:
        model: the base, without adapters.
        max_new_tokens: tokens of an answer at most.
        batch_size: prompts that are answered at once.
        file: keeps the answers.
        names: the adapters' names in the file; default: those of `adapters`.
    """

    def __init__(
        self, model: Any, adapters: Sequence[Adapter], tokenizer: Any, max_new_tokens: int, batch_size: int,
        file: AnswersFile, names: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self.loras = read_loras(model, adapters)[0]
        for lora in self.loras:
            if lora.tokens or lora.saved:
                raise InputError(f"distil: {lora.name}: has more than LoRAs on linears; distil LoRAs without it")
        self.model, self.tokenizer = model, tokenizer
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.file = file
        self.names = [*(names or [lora.name for lora in self.loras]), "base"]
        modules = dict(model.named_modules())
        self.linears = {path: modules[path] for lora in self.loras for path in lora.A}
        self.ends = end_tokens(model, tokenizer)
        base = [base_digest(model), str(model.dtype), max_new_tokens, self.ends]
        self.identities = [[*base, identity] for identity in (*map(_identity, self.loras), "")]

    def rows(self, prompts: Sequence[Sequence[Tokens]]) -> list[dict[str, Any]]:
        """
        Return a row to train on for each prompt: `input_ids` and `labels`, and its teacher in `expert`. Empty answers
        are left out, with a warning.

        Args:
            prompts: for each teacher, the tokens of its prompts. The last teacher is the base.
        """
        for name, of_teacher in zip(self.names, prompts, strict=True):
            if not of_teacher and name != self.names[-1]:
                raise InputError(f"distil: {name}: no prompt is for it; give some for each adapter")
        keys = [[hash_value([self.identities[i], ids]) for ids in of_one] for i, of_one in enumerate(prompts)]
        known: dict[str, Tokens] = on_main_process(self.file.read)
        for i, of_teacher in enumerate(prompts):
            missing = {key: ids for key, ids in zip(keys[i], of_teacher, strict=True) if key not in known}
            for made in self._answers(i, missing):
                known |= made
                lines = [
                    KeptAnswer(self.names[i], self.tokenizer.decode(missing[key]), self._text(tokens), tokens, key)
                    for key, tokens in made.items()
                ]
                on_main_process(partial(self.file.append, lines))
        rows = []
        for i, of_teacher in enumerate(prompts):
            answered = [
                (ids, known[key]) for key, ids in zip(keys[i], of_teacher, strict=True) if self._text(known[key])
            ]
            if of_teacher and not answered:
                raise InputError(f"distil: {self.names[i]}: all its answers are empty; does it know these prompts?")
            if empty := len(of_teacher) - len(answered):
                logger.warning(
                    "%d of %d answers of %s are empty and are left out", empty, len(of_teacher), self.names[i]
                )
            rows += [
                {"input_ids": ids + answer, "labels": [IGNORED] * len(ids) + answer, "expert": i}
                for ids, answer in answered
            ]
        return rows

    def _text(self, answer: Tokens) -> str:
        """Return an answer without its end."""
        return self.tokenizer.decode([t for t in answer if t not in self.ends], skip_special_tokens=True).strip()

    def _answers(self, teacher: int, prompts: Mapping[str, Tokens]) -> Iterator[dict[str, Tokens]]:
        """Yield the answers of a teacher by the prompts' keys, batch by batch."""
        lora, title = [*self.loras, None][teacher], f"answers of {self.names[teacher]}"
        limits = dict.fromkeys(prompts, self.max_new_tokens)
        with with_lora(self.linears, lora, self.model.device):
            yield from answers_in_batches(self.model, prompts, limits, self.ends, self.batch_size, title)


def _identity(lora: PlainLora) -> str:
    """Return what tells a LoRA from others: a hash of its updates."""
    found = hashlib.sha256()
    for path in sorted(lora.A):
        found.update(f"{path} {lora_scaling(lora.config, path)}".encode())
        for matrix in (lora.A[path], lora.B[path]):
            found.update(matrix.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


# --- training --------------------------------------------------------------------------------------------------------


class _RowTrainer(SFTTrainer):
    """
    Gives each row the same weight, as a mean over rows of the mean over a row's answer. In TRL's mean over all tokens,
    a label of two tokens counts nothing beside a general answer of sixty.
    """

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs, use_cache=False, fused_lm_head=True)  # TRL's head, with 0 at ignored positions
        count_B = outputs.label_mask.sum(1).clamp(min=1)
        loss = -(outputs.log_probs.sum(1) / count_B).sum() / ROWS_PER_STEP
        return (loss, outputs) if return_outputs else loss


def fitted(
    model: Any, loras: Sequence[PlainLora], rows: Sequence[Mapping[str, Any]], tokenizer: Any, steps: int, rank: int,
    learning_rate: float, batch_size: int, seed: int,
) -> PeftModel:  # fmt: skip
    """
    Train a new LoRA of the base on teachers' rows.

    Args:
        loras: the teachers; the new LoRA is on all their linears.
        rows: as `Teachers.rows` returns them. Each is used as often as any other of its kind, up to one time.
    """
    rows = random.Random(seed).sample(rows, len(rows))
    own = [row for row in rows if row["expert"] < len(loras)]
    general = [row for row in rows if row["expert"] == len(loras)]
    count = steps * ROWS_PER_STEP // _FIFTH if general else 0
    used = [*islice(cycle(own), steps * ROWS_PER_STEP - count), *islice(cycle(general), count)]
    data = Dataset.from_list([{"input_ids": row["input_ids"], "labels": row["labels"]} for row in used])

    set_seed(seed)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=sorted({path for lora in loras for path in lora.A}),
        task_type=loras[0].config.task_type,
    )  # fmt: skip
    pupil = get_peft_model(model, config)
    at_once = max(rows for rows in (1, 2, 5, 10) if rows <= batch_size)
    on_accelerator = torch.accelerator.is_available()
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, max_steps=steps, learning_rate=learning_rate, lr_scheduler_type="cosine", seed=seed,
            per_device_train_batch_size=at_once, gradient_accumulation_steps=ROWS_PER_STEP // at_once, max_length=None,
            logging_steps=max(1, steps // 10), save_strategy="no", report_to="none", use_cpu=not on_accelerator,
            gradient_checkpointing=on_accelerator, bf16=False, fp16=on_accelerator and model.dtype == torch.float16,
        )  # fmt: skip
        trainer = _RowTrainer(pupil, args, train_dataset=data, processing_class=copy.deepcopy(tokenizer))
        trainer.train()
    return pupil.eval()
