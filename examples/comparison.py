"""The quickstart recipe with each method, on the same data: held-out losses, routing, and UpIT's answers."""

import json
from pathlib import Path
from typing import NamedTuple

from peft import AutoPeftModelForCausalLM
from rich.console import Console
from transformers import AutoTokenizer
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer

from moe_peft.upit import UpIT, load_recipe

from .toy.domains import DOMAINS, Row, write_jsonl

RECIPE = Path(__file__).parents[1] / "recipes" / "upit" / "quickstart.yaml"
# LoRA has rank 16, which is as many active parameters as the mixtures have: 2 of 8 experts of rank 8.
METHODS = {
    "LoRA": ("method=lora", "adapter.r=16", "adapter.lora_alpha=32"),
    "LoRAMoE-SFT": ("method=loramoe_sft",),
    "UpIT": ("method=upit", "router_init.within_budget=true"),  # all see the same number of examples
}
FAST = ("num_experts=4", "sft.per_device_train_batch_size=4", "router_init.seed_fraction=0.2")
BARS = "sft.disable_tqdm=false"  # transformers' verbosity would decide otherwise


class Outcome(NamedTuple):
    """
    Args:
        losses: method → domain (and "mean") → held-out loss per answer token, in nats; "base" first.
        shares: of UpIT: domain → layer → share of the token assignments that each expert gets.
        figure: of these shares, in full.
        adapter: UpIT's.
        answers: held-out question and UpIT's answer, one for each domain.
    """

    losses: dict[str, dict[str, float]]
    shares: dict[str, list[list[float]]]
    figure: Path
    adapter: Path
    answers: dict[str, tuple[str, str]]


def compare(base: Path, train: list[Row], test: list[Row], out: Path, overrides: tuple[str, ...]) -> Outcome:
    """
    Run every method, with its results below `out`: data, a folder for each method, `results.json`.

    Raises:
        ValueError, OSError: a file or setting that does not fit; the message names it.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        write_jsonl(out / f"{name}.jsonl", rows)
    inputs = (
        f"model.name_or_path={base}",
        f"data.train={out / 'train.jsonl'}",
        f"data.eval={out / 'test.jsonl'}",
        BARS,
    )
    results: dict[str, dict[str, float]] = {}
    for method, own in METHODS.items():
        Console(stderr=True).rule(method)
        pipeline = UpIT(load_recipe(RECIPE, [*inputs, f"output_dir={out / method.lower()}", *overrides, *own]))
        adapter = pipeline.run()
        found = pipeline.records["evaluate"]["metrics"]
        results["base"], results[method] = found["loss"]["base"], found["loss"]["adapted"]
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    return Outcome(
        results, found["shares"], pipeline.root / "evaluate" / "routing.png", adapter, answers(adapter, test)
    )


def answers(adapter: Path, rows: list[Row]) -> dict[str, tuple[str, str]]:
    """For each domain, the first of its rows' questions and the adapter's greedy answer to it."""
    model: Model = AutoPeftModelForCausalLM.from_pretrained(adapter)
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(adapter)
    found = {}
    for domain in DOMAINS:
        question = next(row for row in rows if row["domain"] == domain)["messages"][:1]
        prompt = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(model.device)
        output = model.generate(**prompt, max_new_tokens=100, do_sample=False)
        answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        found[domain] = question[0]["content"], answer.strip()
    return found
