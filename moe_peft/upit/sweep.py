"""One recipe with several values of a setting: a run for each, what they share done once, and how they compare."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import yaml
from accelerate import PartialState
from rich.console import Console
from rich.table import Table

from ..analysis.figures import method_name, plot_curves
from ..models.model_size import attention_flops, model_size
from ..training.checkpointing import fingerprint_of, is_complete
from ..utils.distributed import on_main_process
from ..utils.io import link_folder, write_json
from ..utils.messages import InputError
from .pipeline import UpIT
from .plan import StagePlan, plan
from .recipe import load_recipe
from .stage_cache import Stage, read_record

_PASSES = 3  # a backward pass takes about twice what a forward pass takes


@dataclass(frozen=True)
class Point:
    """
    One run of a sweep.

    Args:
        name: the settings that it has, and its folder.
        tokens: that all its stages train on.
        flops: of training: 3 times those of forward passes, by `ModelSize`.
        flops_with_attention: the same by Drop-Upcycling's table 3, which counts embeddings and attention scores, too.
        curve: [tokens, flops, training loss] at each log of the stage that makes the result; those of the stages before
            it are counted in, and losses are means of up to 5 logs.
        held_out: the mean loss on `data.eval`; None without such data.
        tokens_to_loss: tokens until `curve` reaches the loss that all runs of the sweep end with or have passed.
    """

    name: str
    tokens: int
    flops: float
    flops_with_attention: float
    curve: Sequence[tuple[float, float, float]]
    held_out: float | None
    tokens_to_loss: int | None = None


def sweep(path: str | Path, overrides: Sequence[str], swept: Sequence[str], redo: bool = False) -> list[Point]:
    """
    Run a recipe for each value, in folders of its `output_dir`, and write `sweep.json` and `sweep.png` there.

    Args:
        path, overrides: see `load_recipe`.
        swept: `key=value,value,…` with a dotted key and YAML values. Of several keys, all combinations run.
        redo: see `UpIT.run`.
    """
    root = load_recipe(path, overrides).output_dir
    pipelines = {}
    for name, settings in _names(list(product(*map(_values, swept)))).items():
        folder = f"output_dir={json.dumps(f'{root}/{name}')}"
        pipelines[name] = UpIT(load_recipe(path, [*overrides, *settings, folder]))
    plans = {name: plan(pipeline) for name, pipeline in pipelines.items()}
    points: list[Point] = []
    for i, (name, pipeline) in enumerate(pipelines.items()):
        on_main_process(partial(_share, pipeline.stages, [other.root for other in [*pipelines.values()][:i]]))
        pipeline.run(redo)
        points.append(_point(name, pipeline, plans[name]))
    target = max(point.curve[-1][-1] for point in points)
    points = [replace(p, tokens_to_loss=next(int(t) for t, _, loss in p.curve if loss <= target)) for p in points]
    if PartialState().is_main_process:
        parent = pipeline.root.parent
        write_json(parent / "sweep.json", [asdict(point) for point in points])
        names = [re.sub(r"\bmethod=(\w+)", lambda match: method_name(match[1]), point.name) for point in points]
        curves = {name: [(flops, loss) for _, flops, loss in p.curve] for name, p in zip(names, points, strict=True)}
        plot_curves(curves, parent / "sweep.png", "training FLOP", "training loss")
    return points


def _values(swept: str) -> list[str]:
    """`key=value` for each of the values, as they are written."""
    key, equals, text = swept.partition("=")
    try:
        values = yaml.compose(f"[{text}]", yaml.SafeLoader).value
    except yaml.YAMLError:
        values = []
    if not equals or not values:
        raise InputError(f"--sweep {swept!r}: give key=value,value,…")
    return [f"{key}={text[value.start_mark.index - 1 : value.end_mark.index - 1]}" for value in values]


def _names(points: Sequence[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The settings by the name of their run, which is its folder; two of one name get a digest of what was written."""
    names = {settings: re.sub(r"[^\w.=,+-]+", "_", ",".join(settings)) for settings in points}
    taken = Counter(names.values())
    return {
        name if taken[name] == 1 else f"{name}-{hashlib.sha256(repr(settings).encode()).hexdigest()[:6]}": settings
        for settings, name in names.items()
    }


def _share(stages: Sequence[Stage], earlier: Sequence[Path]) -> None:
    """Link those stages of earlier runs that are this run's, too, up to the first that is not."""
    for stage in stages:
        if not is_complete(stage.folder):
            fingerprint = stage.fingerprint()
            same = [
                other / stage.name
                for other in earlier
                if is_complete(other / stage.name)
                and fingerprint_of(other / stage.name).difference(fingerprint) is None
            ]
            if not same or stage.folder.exists():
                return
            stage.folder.parent.mkdir(parents=True, exist_ok=True)
            link_folder(same[0], stage.folder)
        stage.context.records[stage.name] = read_record(stage.folder)


def _point(name: str, pipeline: UpIT, plans: Sequence[StagePlan]) -> Point:
    metrics = {stage: record["metrics"] for stage, record in pipeline.records.items()}
    base, rows = pipeline.context.base, len(pipeline.context.train_data)
    dense, config = model_size(base.empty()).flops, base.config.get_text_config()
    tokens, flops, with_attention = 0, 0.0, 0.0
    arguments = {stage.name: stage.sft for stage in pipeline.trainer_stages}
    for p in plans:
        sft = arguments[p.name]
        length = sft["max_length"] if sft.get("packing") else p.tokens / p.epochs / rows
        per_token = metrics[p.name].get("size", {}).get("flops", dense)
        before = (tokens, flops)
        tokens += p.tokens
        flops += _PASSES * p.tokens * per_token
        with_attention += _PASSES * p.tokens * (per_token + attention_flops(config, length))
    last = metrics[plans[-1].name]  # of the stage that makes the result
    logged = [(entry["step"] / last["steps"], entry["loss"]) for entry in last["history"] if "loss" in entry]
    curve = []
    for i, (share, _) in enumerate(logged):
        means = [loss for _, loss in logged[max(0, i - 4) : i + 1]]
        done = (start + share * (end - start) for start, end in zip(before, (tokens, flops), strict=True))
        curve.append((*done, sum(means) / len(means)))
    losses = metrics.get("evaluate", {}).get("loss")
    return Point(name, tokens, flops, with_attention, curve, None if losses is None else losses["adapted"]["mean"])


def print_sweep(points: Sequence[Point]) -> None:
    """A table of the runs, from the main process."""
    if not PartialState().is_main_process:
        return
    costs = ("tokens", "training FLOP", "with attention")
    table = Table("run", *costs, "training loss", "held-out loss", "tokens to same loss", title="Sweep")
    for p in points:
        held_out = "" if p.held_out is None else f"{p.held_out:.3f}"
        numbers = (f"{p.tokens:,}", f"{p.flops:.3g}", f"{p.flops_with_attention:.3g}", f"{p.curve[-1][-1]:.3f}")
        table.add_row(p.name, *numbers, held_out, f"{p.tokens_to_loss:,}")
    Console(markup=False, emoji=False).print(table)
