"""
Stage 3, router initialisation (UpIT, section 2.2, Equations 1 and 2, Algorithms 1 and 3): each seed example goes to the
expert that knows it best; then, one after the other, every expert and its routing vectors learn from their bucket.

An expert is a LoRA adapter on the frozen base, or a dense model of which only the FFNs are trained. Either way it is
trained by itself: gate 1, all other experts absent, with its own optimizer, schedule and clipping. Its routing vectors
become row i of each router.

Legend: B rows, S positions, M routed modules (a model's FFNs), n experts, d hidden units.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import PartialState
from datasets import Dataset
from peft import PeftConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.utils import load_peft_weights
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from trl import SFTConfig, SFTTrainer

from ..adapter.ffn_layout import find_layout
from ..adapter.layers import linear_features
from ..adapter.lora_conversion import determined_fields
from ..native.safetensors_io import Checkpoint
from ..training.labels import IGNORED
from ..training.mixins import FiniteWeightsMixin
from ..training.preparation import for_one_trainer, tokenized
from ..training.resuming import Trained, train
from ..training.router_log import RouterLog
from ..training.scoring import Collator, example_losses
from ..utils.compat import loss_is_of_whole_step
from ..utils.distributed import on_main_process
from ..utils.io import atomic_write
from ..utils.torch_contexts import free_memory
from .buckets import Buckets, fill_buckets
from .files import ADAPTER_FILES, copy_adapter, expert_folders, link_model, write_adapter, write_without

Load = Callable[[Path], PreTrainedModel]

# --- routing vectors -------------------------------------------------------------------------------------------------

VECTORS = "routing_vectors"


class RoutingVectors(nn.Module):
    """
    One routing vector r [d] for each routed module of a model: an FFN, or a single linear.

    Args:
        modules: the routed modules.
        seed: of the initial values, N(0, 0.02²).
    """

    def __init__(self, modules: Sequence[nn.Module], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        vectors = [torch.empty(_input_size(module)).normal_(std=0.02, generator=generator) for module in modules]
        device = next(modules[0].parameters()).device
        self.vectors = nn.ParameterList(vector.to(device) for vector in vectors)

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """`x·r` [B, S] in float32. Not a matrix product, which autocast would compute in half precision."""
        return (x.float() * self.vectors[index].float()).sum(-1)


def _input_size(module: nn.Module) -> int:
    layout = find_layout(module)
    return linear_features(module if layout is None else module.get_submodule(layout.inputs[0]))[0]


def record_scores(model: nn.Module, names: Sequence[str]) -> list[torch.Tensor]:
    """
    Have a forward pass of a model with routing vectors put its scores `x·r` [B, S], one for each routed module, into
    the list that is returned, and which is to be cleared before the pass.

    Under gradient checkpointing, layers run again in the backward pass. A reentrant checkpoint runs them without a
    graph first: then the scores are leaves, whose gradients are added in the second run.
    """
    scores: list[torch.Tensor] = []

    def hook(index: int) -> Callable[[nn.Module, tuple], tuple]:
        def record(module: nn.Module, args: tuple) -> tuple:
            score = model.get_submodule(VECTORS)(args[0], index)  # a module's call, for which ZeRO-3 gathers vectors
            if len(scores) < len(names):
                scores.append(score if torch.is_grad_enabled() else score.detach().requires_grad_())
            elif scores[index].is_leaf and (gradient := scores[index].grad) is not None:
                score.register_hook(gradient.add)
            # The same input, but tied to the score: DistributedDataParallel would take the vectors for unused if no
            # output depended on them.
            return (args[0] + 0 * score.unsqueeze(-1).to(args[0].dtype), *args[1:])

        return record

    for index, name in enumerate(names):
        model.get_submodule(name).register_forward_pre_hook(hook(index))
    return scores


# --- training of one expert ------------------------------------------------------------------------------------------


class RouterInitTrainer(FiniteWeightsMixin, SFTTrainer):
    """
    Trains one expert and its routing vectors with `α·L_lm + (1-α)·L_aux`, where L_lm is the mean over the answer tokens
    of an optimizer step, as in TRL's own training, and L_aux the mean of `BCE(sigmoid(x·r), 1)` over all its real
    tokens and the routed modules.

    Args:
        names: the routed modules.
        alpha: α.
    """

    def __init__(self, model: Any, *args: Any, names: Sequence[str], alpha: float, **kwargs: Any) -> None:
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        self.scores, self.alpha = record_scores(base, names), alpha
        super().__init__(model, *args, **kwargs)
        self.log_of_losses = RouterLog(self, ())

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> Any:
        """The batches of an optimizer step; their tokens are counted, over all processes."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        answers = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)
        tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
        counts = self.accelerator.reduce(torch.tensor([answers, tokens], device=device), "sum")
        self.answers_in_step, self.tokens_in_step = counts.clamp(min=1).tolist()
        return batches, num_items

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        self.scores.clear()
        outputs = model(**inputs, fused_lm_head=True)
        scores_MBS = torch.stack([score.to(outputs.log_probs.device) for score in self.scores])
        mask_BS = inputs["attention_mask"]
        lm_loss = -outputs.log_probs.sum()
        routing_loss = (F.softplus(-scores_MBS).mean(0) * mask_BS).sum()  # -log(sigmoid(x·r))
        loss = self.alpha * lm_loss / self.answers_in_step + (1 - self.alpha) * routing_loss / self.tokens_in_step
        self.log_of_losses.note({
            "lm_loss": (lm_loss, outputs.label_mask.sum()),
            "routing_loss": (routing_loss, mask_BS.sum()),
        })  # fmt: skip
        # Gradients are averaged over processes, and over accumulation steps unless the loss is of the complete step.
        loss = loss * self.args.world_size
        if not loss_is_of_whole_step(self, num_items_in_batch):
            loss = loss * self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


# --- experts ---------------------------------------------------------------------------------------------------------


def is_lora(folder: Path) -> bool:
    return (folder / ADAPTER_FILES[0]).is_file()


def _routed_modules(model: PreTrainedModel, experts: Sequence[Path]) -> list[str]:
    """The modules that get a router: those that the LoRAs adapt, or every layer's FFN."""
    if not is_lora(experts[0]):
        return [f"model.layers.{layer}.mlp" for layer in range(model.config.num_hidden_layers)]
    adapted = set(determined_fields(model, sorted(set(experts)))["target_modules"])
    return [name for name, _ in model.named_modules() if name in adapted]


def add_routing_vectors(model: PreTrainedModel, names: Sequence[str], seed: int) -> RoutingVectors:
    """Give a model new vectors for these of its modules."""
    vectors = RoutingVectors([model.get_submodule(name) for name in names], seed)
    model.add_module(VECTORS, vectors)
    return vectors


def _trainable(model: PreTrainedModel, expert: Path, names: Sequence[str], seed: int) -> PreTrainedModel | PeftModel:
    """An expert with routing vectors: the dense model itself, or the base with the expert's LoRA."""
    vectors = add_routing_vectors(model, names, seed)
    if not is_lora(expert):
        return model
    config = PeftConfig.from_pretrained(expert)
    config.inference_mode, config.modules_to_save = False, [VECTORS]  # saved and resumed beside the LoRA
    weights = load_peft_weights(str(expert), device="cpu")
    weights |= {_saved_name(i): vector.data for i, vector in enumerate(vectors.vectors)}
    adapted = get_peft_model(model, config)
    set_peft_model_state_dict(adapted, weights)
    return adapted


def train_expert(model: nn.Module, ffns: bool) -> None:
    """Train an expert's routing vectors alone, or its FFNs too: the LoRAs on them, or all their weights."""
    part = "lora_" if isinstance(model, PeftModel) else ".mlp."
    for name, parameter in model.named_parameters():
        is_vector = VECTORS in name and "original_module" not in name  # PEFT keeps a frozen copy
        parameter.requires_grad_(is_vector or (ffns and part in name))


def _saved_name(index: int) -> str:
    """Of a routing vector in an adapter's file."""
    return f"base_model.model.{VECTORS}.vectors.{index}"


def _keep(checkpoint: Path, source: Path, target: Path) -> None:
    """Write the trained expert without its routing vectors, in the form of the one that it was."""
    if is_lora(source):
        weights = load_peft_weights(str(checkpoint), device="cpu")
        write_adapter({name: weight for name, weight in weights.items() if VECTORS not in name}, source, target)
    else:
        write_without(checkpoint, f"{VECTORS}.", source, target)


def _read_vectors(checkpoint: Path, count: int) -> list[torch.Tensor]:
    """The routing vectors [d] of a checkpoint, one for each routed module."""
    if not is_lora(checkpoint):
        model = Checkpoint(checkpoint)
        return [model.tensor(f"{VECTORS}.vectors.{i}").float() for i in range(count)]
    weights = load_peft_weights(str(checkpoint), device="cpu")
    return [weights[_saved_name(i)].float() for i in range(count)]


# --- the stage -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InitialRouters:
    """
    What stage 3 leaves.

    Args:
        experts: folders of the trained experts.
        routers: the routers' weights [n, d], one for each routed module in the model's order.
        buckets: each expert's indices into the seed examples.
        perplexity: of every expert on every seed example, [S, n]; None if the rule did not need it.
        trained: the trainings of the experts that have examples.
    """

    experts: list[Path]
    routers: list[torch.Tensor]
    buckets: Buckets
    perplexity: torch.Tensor | None
    trained: list[Trained]


def init_routers(
    load: Load,
    experts: Sequence[str | Path],
    dataset: Dataset,
    args: SFTConfig,
    processing_class: PreTrainedTokenizerBase,
    *,
    output_dir: str | Path,
    buckets: str = "perplexity",
    alpha: float = 0.5,
    train_experts: bool = True,
    capacity: int | None = None,
    label_column: str | None = None,
    expert_map: Mapping[Any, Sequence[int]] | None = None,
) -> InitialRouters:
    """
    Assign the seed examples to experts, then train each expert and its routing vectors on its bucket (UpIT, Algorithms
    1 and 3).

    If it was stopped and is run again, it resumes where it was.

    Args:
        load: an expert's folder → its dense model; of a LoRA adapter its base, without adapters. It is called for every
            expert, and one model is in memory at a time.
        experts: n folders: LoRA adapters of one base, or dense models of one architecture.
        dataset: the seed examples (in the paper a random 1 % of the data), in random order: rules with a capacity visit
            them in the order given.
        args: how to train each expert; `num_train_epochs` counts passes over its bucket.
        processing_class: the tokenizer.
        output_dir: gets `experts/0`, …, adapter or model folders. The trainings' state goes to `args.output_dir`.
        buckets: how examples are assigned to experts, a name in `BUCKETS`: `"perplexity"`, `"label"` or `"random"`.
        alpha: weight of the language-modelling loss; the routing loss has 1 - alpha.
        train_experts: False trains the routing vectors alone.
        capacity: the most examples in a bucket of `"perplexity"`; `ceil(S / n)` if None.
        label_column: the column of labels, for `"label"`.
        expert_map: label → experts, for `"label"`; see `label_buckets`.

    Returns:
        the experts' folders, the routers' weights, the buckets and the logs. An expert without examples keeps its
        values, and its routing vectors are random.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from peft import LoraConfig, get_peft_model
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from trl import SFTConfig
    >>> from moe_peft.upit import init_routers
    >>> def base(expert=None):
    ...     return AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    >>> config = LoraConfig(
    ...     r=4,
    ...     target_modules=["up_proj"],
    ...     init_lora_weights=False,
    ...     task_type="CAUSAL_LM",
    ... )
    >>> for name in ("math", "code"):
    ...     get_peft_model(base(), config).save_pretrained(name)
    >>> tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
    >>> seeds = load_dataset("json", data_files="train.jsonl", split="train[:4]")
    >>> args = SFTConfig(
    ...     "state", num_train_epochs=1, bf16=False, use_cpu=True, report_to="none"
    ... )
    >>> routed = init_routers(
    ...     base,
    ...     ["math", "code"],
    ...     seeds,
    ...     args,
    ...     tokenizer,
    ...     output_dir="routed",
    ...     buckets="random",
    ... )
    >>> [len(bucket) for bucket in routed.buckets], len(routed.routers[0])
    ([2, 2], 2)

    ```
    """
    sources = [Path(expert) for expert in experts]
    targets = expert_folders(Path(output_dir), len(sources))
    args = copy.copy(args)
    args.packing = args.padding_free = False  # each example has perplexities and a bucket of its own
    data, collator = tokenized(dataset, processing_class, args)
    filled, perplexity_SN = fill_buckets(
        data,
        len(sources),
        buckets,
        lambda: _perplexities(load, sources, data, collator, Path(str(args.output_dir))),
        seed=args.seed,
        capacity=capacity,
        label_column=label_column,
        expert_map=expert_map,
    )
    names: list[str] = []
    vectors, logs = [], []
    for i, (source, target, bucket) in enumerate(zip(sources, targets, filled, strict=True)):
        expert_args = _expert_arguments(args, i)  # before the model, which ZeRO-3 then shards
        set_seed(expert_args.seed)
        model: Any = load(source)
        names = names or _routed_modules(model, sources)
        model = _trainable(model, source, names, expert_args.seed)
        if bucket:
            train_expert(model, train_experts)
            trainer = RouterInitTrainer(
                model, expert_args, train_dataset=data.select(bucket), processing_class=processing_class,
                names=names, alpha=alpha,
            )  # fmt: skip
            trained = train(trainer, alpha=alpha)
            logs.append(trained)
            vectors.append(_read_vectors(trained.last, len(names)))
            if args.should_save:
                _keep(trained.last, source, target)
            del trainer
        else:
            vectors.append([vector.detach().float().cpu() for vector in _vectors_of(model)])
            if args.should_save:
                (copy_adapter if is_lora(source) else link_model)(source, target)
        PartialState().wait_for_everyone()
        del model  # one at a time
        free_memory()
    routers = [torch.stack(rows) for rows in zip(*vectors, strict=True)]
    return InitialRouters(targets, routers, filled, perplexity_SN, logs)


def _vectors_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if VECTORS in name and "original_module" not in name]


def _expert_arguments(args: SFTConfig, expert: int) -> SFTConfig:
    """The arguments of one expert's training."""
    expert_args = for_one_trainer(args)
    expert_args.output_dir = str(Path(str(args.output_dir)) / f"expert-{expert}")
    expert_args.seed = expert_args.data_seed = args.seed + expert
    expert_args.dataloader_drop_last = False  # a bucket may be smaller than a batch
    return expert_args


def _perplexities(load: Load, experts: Sequence[Path], data: Dataset, collator: Collator, state: Path) -> torch.Tensor:
    """Each expert's perplexity on each example, [S, n]; kept in `state`, as others would make other buckets."""
    path = state / "perplexity.safetensors"
    digest = hashlib.sha256(json.dumps([list(data["input_ids"]), [str(e) for e in experts]]).encode()).hexdigest()
    if path.is_file():
        with safe_open(path, framework="pt") as file:
            if file.metadata() == {"examples": digest}:
                return file.get_tensor("perplexity")
    columns = []
    for model in _scored_models(load, experts):
        losses_S, counts_S = example_losses(model, data, collator)
        columns.append((losses_S / counts_S).exp())
        del model
        free_memory()
    free_memory()  # of the LoRAs' base, which the generator held
    perplexity_SN = torch.stack(columns, dim=1)
    on_main_process(lambda: _save_perplexity(path, perplexity_SN, digest))
    return perplexity_SN


def _save_perplexity(path: Path, perplexity_SN: torch.Tensor, digest: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        save_file({"perplexity": perplexity_SN.contiguous()}, partial, metadata={"examples": digest})


def _scored_models(load: Load, experts: Sequence[Path]) -> Iterator[PreTrainedModel | PeftModel]:
    """The experts, one after the other; LoRAs on a single base."""
    if not is_lora(experts[0]):
        yield from (load(folder) for folder in experts)
        return
    model = PeftModel.from_pretrained(load(experts[0]), experts[0], adapter_name="0")
    for i, folder in enumerate(experts):
        if i:
            model.load_adapter(folder, str(i))
            model.set_adapter(str(i))
        yield model
