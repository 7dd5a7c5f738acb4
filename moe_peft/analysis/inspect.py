"""`moe-peft inspect`: run a model over data and report its routing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import AutoPeftModelForCausalLM
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from ..messages import one_line
from ..models.native_routers import CONFIG_FIELD
from ..models.view import text_config
from ..native import load_routers
from ..training.data import load_data
from ..training.tokenizing import tokenized
from .record import RoutingStatistics, record_routing
from .report import write_report
from .token_classes import classify_tokens


@torch.no_grad()
def inspect_model(
    model_path: str,
    data: str,
    output_dir: str | Path,
    *,
    label_column: str | None = None,
    expert_map: dict[str, list[int]] | None = None,
    batch_size: int = 8,
    max_length: int = 1024,
    max_examples: int | None = None,
) -> RoutingStatistics:
    """
    Report the routing of an adapter or a native MoE on a data set: tables, figures and a printed summary.

    Args:
        model_path: the folder of an adapter or a native MoE.
        data: a .json, .jsonl, .csv or .parquet file, or a data set's name; in a format that TRL accepts.
        output_dir: the folder for the files of `write_report`.
        label_column: the column that holds the domains.
        expert_map: domain → experts, for compliance.
        batch_size: examples per forward pass.
        max_length: tokens per example; longer ones are truncated.
        max_examples: how many examples to use, from the first on; None: all.

    Raises:
        ValueError: the model or the data does not exist, or the model has no routers.
    """
    model, tokenizer = _load(model_path)
    dataset = load_data(data, "--data", label_column)
    if max_examples is not None:
        dataset = dataset.select(range(min(max_examples, len(dataset))))
    args = SFTConfig(
        output_dir=str(output_dir), bf16=False, max_length=max_length, report_to="none", gradient_checkpointing=False,
        use_cpu=not torch.accelerator.is_available(),
    )  # fmt: skip
    rows, collator = tokenized(dataset, tokenizer, args)
    labels = [str(label) for label in rows[label_column]] if label_column else ["all"] * len(rows)
    size = model.get_input_embeddings().weight.shape[0]
    device = next(model.parameters()).device
    model.eval()
    with record_routing(model, sorted(set(labels)), expert_map, classify_tokens(tokenizer, size)) as statistics:
        for start in tqdm(range(0, len(rows), batch_size), desc="routing"):
            examples = [rows[i] for i in range(start, min(start + batch_size, len(rows)))]
            statistics.current = labels[start : start + batch_size]
            batch = collator(examples)
            model(
                input_ids=batch["input_ids"].to(device),
                attention_mask=batch["attention_mask"].to(device),
                logits_to_keep=1,
            )
    files = write_report(statistics, output_dir)
    _print(statistics, files)
    return statistics


def _load(path: str) -> tuple[Any, Any]:
    kind = AutoPeftModelForCausalLM if (Path(path) / "adapter_config.json").is_file() else AutoModelForCausalLM
    try:
        model = kind.from_pretrained(path)
        if kind is AutoModelForCausalLM and hasattr(text_config(model), CONFIG_FIELD):
            load_routers(model, path)
        source = path if (Path(path) / "tokenizer_config.json").is_file() else model.config._name_or_path
        return model, AutoTokenizer.from_pretrained(source)
    except OSError as error:
        raise ValueError(f"--model {path!r}: {one_line(error)}") from error


def _print(statistics: RoutingStatistics, files: list[Path]) -> None:
    console = Console()
    table = Table("domain", "tokens", "busiest experts (share over all layers)", title="Routing")
    for domain, share_LN in statistics.shares().items():
        share_N = share_LN.mean(0)
        best = share_N.topk(min(4, len(share_N)))
        busiest = ", ".join(f"{i} ({v:.0%})" for v, i in zip(best.values.tolist(), best.indices.tolist(), strict=True))
        tokens = int(statistics.tokens[statistics.domains.index(domain)])
        table.add_row(domain, f"{tokens:,}", busiest)
    console.print(table)
    if statistics.allowed is not None:
        console.print(f"mean compliance: {statistics.mean_compliance():.1%}")
    for warning in statistics.warnings():
        console.print(f"[yellow]{warning}[/yellow]")
    for path in files:
        console.print(str(path), highlight=False, soft_wrap=True)
