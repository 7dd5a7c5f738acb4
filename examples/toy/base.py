"""
A small base model of the Llama architecture, trained on the CPU for the demo and the benchmarks to adapt.

    python -m examples.toy.base --out .cache/base --seed 0

It is trained on the standard library's source, the language reference and plain sums as running text: the training side
of `domains.py`, never a test item. So, like any base model, it knows the material but not the instruction format. The
result is an ordinary model folder.
"""

import argparse
import random
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from moe_peft.training.progress import show_progress

from .domains import is_held_out, operands, package, reference_topics, stdlib_modules

CONTEXT = 256  # tokens of running text per training row
PAD, END = "<|pad|>", "<|end|>"
# Roles are ordinary text: fine-tuning leaves the embeddings frozen, so a special token that the base model never saw
# would stay noise. They end in a newline because, unlike a space, a newline never merges with the word after it: the
# answer's first token is then the same in training as after the generation prompt. END is in the generation block
# because stopping is part of the answer.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize + ':\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)


def sums(rng: random.Random) -> Iterator[str]:
    """Short lists of sums, in words and in figures, without intermediate steps; endless."""
    while True:
        lines: list[str] = []
        while len(lines) < 8:
            word = rng.choice(("plus", "minus", "times"))
            a, b = rng.randrange(100), rng.randrange(10 if word == "times" else 100)
            if is_held_out(operands(a, b)):
                continue
            sign, result = {"plus": ("+", a + b), "minus": ("-", a - b), "times": ("*", a * b)}[word]
            lines.append(f"{a} {word} {b}: {a} {sign} {b} = {result}")
        yield "\n".join(lines)


def take(texts: Iterable[str], chars: int) -> Iterator[str]:
    """As many of the first texts as it takes to reach a number of characters."""
    for text in texts:
        if chars <= 0:
            return
        yield text
        chars -= len(text)


def corpus(rng: random.Random, chars: int) -> list[str]:
    """About `chars` characters of documents. The reference is short, so it is read several times over."""
    code = [text for path, text in stdlib_modules().items() if not is_held_out(package(path))]
    topics = [(title, blocks) for title, blocks in reference_topics().items() if not is_held_out(title)]
    prose = ["\n\n".join([title, *blocks]) for title, blocks in topics]
    rng.shuffle(code)
    rng.shuffle(prose)
    shares = ((code, 0.7), (cycle(prose), 0.2), (sums(rng), 0.1))
    documents = [text for texts, share in shares for text in take(texts, int(share * chars))]
    rng.shuffle(documents)
    return documents


def train_tokenizer(documents: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; every digit is a token, so that sums can be worked out column by column."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, special = words.alphabet(), [PAD, END]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def ensure_base(
    path: Path,
    seed: int,
    hidden: int = 128,
    layers: int = 4,
    vocab_size: int = 2048,
    chars: int = 5_000_000,
    more: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    learning_rate: float = 3e-3,
) -> Path:
    """
    Return the model folder `path`; if there is none yet, train the model first, with a progress bar.

    Args:
        path: of the model folder.
        seed: of the data's order and the initial weights.
        hidden, layers, vocab_size: size of the model.
        chars: characters of training text.
        more: further documents to train on.
        dtype: in which the weights are stored; training is in float32.
        learning_rate: the highest; a wider model needs a lower one.

    Raises:
        FileExistsError: `path` exists but is no model folder.
    """
    if (path / "config.json").is_file():
        return path
    if path.exists():
        raise FileExistsError(f"{path}: exists but is not a model folder; remove it or name another")
    documents = corpus(random.Random(seed), chars)
    if more:
        documents += more
        random.Random(seed).shuffle(documents)
    tokenizer = train_tokenizer(documents, vocab_size)
    set_seed(seed)
    # Written under a temporary name and renamed when complete: an interrupted run leaves no broken model folder.
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = LlamaForCausalLM(base_config(tokenizer, hidden, layers))
    train(model, running_text(documents, tokenizer), partial, seed, learning_rate)
    model.to(dtype).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(path)
    return path


def running_text(documents: Iterable[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """The documents' tokens one after the other, cut into rows of CONTEXT."""
    ids = list(chain.from_iterable(tokenizer([text + END for text in documents])["input_ids"]))
    return [ids[start : start + CONTEXT] for start in range(0, len(ids) - CONTEXT + 1, CONTEXT)]


def base_config(tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=2 * CONTEXT,
        tie_word_embeddings=True,
        # The default suits widths of thousands; at this width the model would learn far more slowly.
        initializer_range=hidden**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def train(model: LlamaForCausalLM, rows: list[list[int]], folder: Path, seed: int, learning_rate: float) -> None:
    """One pass over the rows, with a progress bar."""
    args = TrainingArguments(
        output_dir=str(folder),
        run_name="base model",
        disable_tqdm=False,
        num_train_epochs=1,
        per_device_train_batch_size=4,  # many small steps: the limit here is time, not memory
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        weight_decay=0.1,
        logging_steps=100,
        save_strategy="no",
        report_to="none",
        seed=seed,
    )
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
    trainer = Trainer(model, args, default_data_collator, dataset)
    show_progress(trainer)
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the toy base model.")
    parser.add_argument("--out", type=Path, default=Path(".cache/base"), help="model folder to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=128, help="width")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--chars", type=int, default=5_000_000, help="characters of training text")
    args = parser.parse_args()
    try:
        base = ensure_base(args.out, args.seed, args.hidden, args.layers, args.vocab_size, args.chars)
        print(f"base model: {base}")
    except OSError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
