"""Train a small Llama-architecture base model, on the CPU, for the demo to adapt.

    python examples/tiny_base.py --out .cache/base --seed 0

It reads the standard library's source, the language reference and plain sums as running text - the training
side of `domains.py`, never a test item - so that, like any base model, it has met the material but not the
instruction format. The result is an ordinary model folder.
"""

import argparse
import random
import shutil
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, cycle
from pathlib import Path

from datasets import Dataset
from domains import is_held_out, operands, package, reference_topics, stdlib_modules
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

CONTEXT = 256  # tokens of running text per training row
PAD, END = "<|pad|>", "<|end|>"
# Roles are spelled in ordinary text: fine-tuning leaves the embeddings frozen, so a role token that the base
# never met would stay noise. They end in a newline because, unlike a space, it never merges with the word
# after it: the answer's first token is then the same in training as after the generation prompt. END is in
# the generation block because stopping is part of the answer.
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
    """An endless supply of short lists of sums, in words and in figures, without working."""
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
    """The first texts that together reach a number of characters."""
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
    """Byte-level BPE; digits stay single, so that sums can be worked out column by column."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, special = words.alphabet(), [PAD, END]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(documents, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def ensure_base(
    path: Path, seed: int, hidden: int = 128, layers: int = 4, vocab_size: int = 2048, chars: int = 5_000_000
) -> Path:
    """Return the model folder `path`, training the model first if it is not there yet."""
    if (path / "config.json").is_file():
        return path
    if path.exists():
        raise FileExistsError(f"{path} exists but is not a model folder")
    documents = corpus(random.Random(seed), chars)
    tokenizer = train_tokenizer(documents, vocab_size)
    ids = list(chain.from_iterable(tokenizer([text + END for text in documents])["input_ids"]))
    rows = [ids[start : start + CONTEXT] for start in range(0, len(ids) - CONTEXT + 1, CONTEXT)]

    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=2 * CONTEXT,
        tie_word_embeddings=True,
        # The default is made for widths of thousands; at this one the model would learn far more slowly.
        initializer_range=hidden**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # Written under a temporary name and renamed when whole: an interrupted run leaves no broken cache.
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    args = TrainingArguments(
        output_dir=str(partial),
        num_train_epochs=1,
        per_device_train_batch_size=4,  # many small steps: time, not memory, is what runs out here
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        weight_decay=0.1,
        logging_steps=100,
        save_strategy="no",
        report_to="none",
        seed=seed,
    )
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
    model = LlamaForCausalLM(config)
    Trainer(model, args, default_data_collator, dataset).train()
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo's base model.")
    parser.add_argument("--out", type=Path, default=Path(".cache/base"), help="model folder to make")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        print(f"base model: {ensure_base(args.out, args.seed)}")
    except OSError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
