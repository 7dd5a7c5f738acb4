"""`moe-peft inspect`: run a model over data and report its routing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import tqdm

from ..models.introspection import base_model, expert_names
from ..models.layer import routed_layers, router_names
from ..models.model_size import ModelSize, expert_similarity, model_size
from ..native.folders import open_folder
from ..routing.expert_map import in_order
from ..utils.expert_likeness import likeness
from ..utils.io import output_folder
from ..utils.messages import InputError
from ..utils.model_card import is_untrained_mixture
from .html import EFFECTIVE, STRONGEST, numbering, strongest, write_html
from .inputs import ReportData, describe, load_rows
from .inspect_settings import InspectSettings
from .recorder import RoutingStatistics, record_routing
from .routing_report import is_report, replaced_report, write_report
from .texts import sample_texts
from .token_classes import classify_tokens


@torch.no_grad()
def inspect_model(settings: InspectSettings) -> RoutingStatistics:
    """
    Report the routing of an adapter or a native MoE on a dataset: tables, figures and a printed summary. The summary
    also has the model's size and the similarity of its experts. `settings.output` is a new folder, or a folder with an
    earlier report.
    """
    with output_folder(settings.output, "output", is_report) as folder:
        opened = open_folder(settings.model, "--model", base=settings.base)
        model, tokenizer = opened.load(settings.dtype, settings.quantization), opened.tokenizer
        rows = load_rows(
            tokenizer, settings.data, settings.label_column, settings.split, batch_size=settings.batch_size,
            max_length=settings.max_length, max_examples=settings.max_examples,
        )  # fmt: skip
        statistics = _recorded(model, tokenizer, rows, settings.expert_map, settings.dtype)
        texts = sample_texts(model, tokenizer, rows) if settings.html else None
        about = {
            "model": settings.model, **_about(model), "mixed": is_untrained_mixture(settings.model),
            "data": settings.data, "split": settings.split, "examples": len(rows.data),
        }  # fmt: skip
        with replaced_report(folder) as partial:
            files = write_report(statistics, partial, f".{settings.figures}", about)
            if texts is not None:
                files.append(write_html(statistics, partial / "report.html", about, files, texts))
    _print(statistics, about, [folder / path.name for path in files])
    return statistics


def _recorded(model: Any, tokenizer: Any, rows: ReportData, expert_map: Any, dtype: str) -> RoutingStatistics:
    """Record the routing of all rows."""
    labels = rows.domains or ["all"] * len(rows.data)
    classes = classify_tokens(tokenizer, model.get_input_embeddings().weight.shape[0])
    device = next(model.parameters()).device
    with record_routing(model, in_order(labels, expert_map), expert_map, classes) as statistics:
        for start in tqdm(range(0, len(rows.data), rows.batch_size), desc="routing"):
            stop = min(start + rows.batch_size, len(rows.data))
            batch = rows.collator([rows.data[i] for i in range(start, stop)])
            statistics.current = labels[start:stop]
            inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
            model(**inputs, logits_to_keep=1)
    if statistics.broken.any():
        layer = int(statistics.broken.nonzero()[0])
        raise InputError(
            f"dtype={dtype!r}: logits of router {layer} are not finite; use bfloat16 or float32, or another model"
        )
    return statistics


def _about(model: Any) -> dict[str, Any]:
    """Return the model's class, dtype, quantization and size, and the similarity of its experts."""
    cosines_NN = expert_similarity(model)
    return {
        **describe(model),
        "base": base_model(model).config._name_or_path if isinstance(model, PeftModel) else None,
        "expert_names": expert_names(model),
        "routers": router_names(model),
        "size": asdict(model_size(model)),
        "similarity": None if cosines_NN is None else cosines_NN.tolist(),
        "similarity_of": next((layer.compared for layer in routed_layers(model)), "weights"),
    }


def _print(statistics: RoutingStatistics, about: dict[str, Any], files: list[Path]) -> None:
    console = Console(markup=False, emoji=False)
    # The model, the data and the similarity of experts.
    lines = [
        f"{about['model']}: {about['class']}, {about['dtype']}, {about['quantization'] or 'not quantized'}",
        f"{about['data']}: split {about['split']}, {about['examples']:,} examples",
        str(ModelSize(**about["size"])),
    ]
    if (alike := likeness(about["similarity"])) is not None:
        between = f"({alike.smallest:.3f} to {alike.largest:.3f})"
        lines.append(f"similarity of experts: cosine of their {about['similarity_of']} {alike.mean:.3f} {between}")
    for line in [*lines, *numbering(about["routers"])]:
        console.print(line, highlight=False, soft_wrap=True)
    # The routing of each domain's tokens.
    has_map = statistics.allowed is not None
    columns = ("tokens", "differs", EFFECTIVE, STRONGEST, *(["compliance", "chance"] if has_map else []))
    table = Table("domain", *columns, title="Routing")
    specialization, effective = statistics.specialization(), statistics.effective()
    for domain, share_LN in statistics.shares().items():
        tokens = int(statistics.tokens[statistics.domains.index(domain)])
        numbers = (f"{specialization[domain].mean():.0%}", f"{effective[domain].mean():.2f}")
        cells = [domain, f"{tokens:,}", *numbers, strongest(share_LN, names=about["expert_names"])]
        if has_map:
            cells += [f"{x:.1%}" for x in (statistics.mean_compliance(domain), statistics.chance()[domain])]
        table.add_row(*cells)
    console.print(table)
    if has_map:
        console.print(f"mean compliance: {statistics.mean_compliance():.1%}")
    # The health of the load.
    warning = statistics.warning()
    said = statistics.health() if about["mixed"] else warning or statistics.health()  # no advice on untrained gates
    console.print(f"load: {said}", style="yellow" if warning else None, highlight=False, soft_wrap=True)
    for path in files:
        console.print(str(path), highlight=False, soft_wrap=True)
