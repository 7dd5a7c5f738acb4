"""Opens what a mixture is made of, each folder once, and checks that the parts fit together."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..adapter.plain_lora import lora_scalings
from ..native.folders import (
    AdapterFolder,
    DenseFolder,
    LoraFolder,
    MoELoraFolder,
    WholeModel,
    base_named,
    check_same_tokens,
    open_folder,
)
from ..routing.expert_map import label_text
from ..utils.io import hash_file
from ..utils.loading import adapter_weights, check_tokenizer, read_adapter_weights
from ..utils.messages import InputError

logger = logging.getLogger("moe_peft")


@dataclass(frozen=True)
class Parts:
    """
    LoRA adapters, opened and checked.

    Args:
        labels: names of all experts, in order.
        adapters: the adapters that become experts.
        base: the base model of all adapters.
        tokenizer: the first part's tokenizer.
        mixture: the mixture that the only adapter joins; None: a new mixture.
        replace: the expert that the adapter replaces in `mixture`; None: it is added.
        always: a LoRA that serves every token.
    """

    labels: list[str]
    adapters: list[LoraFolder]
    base: WholeModel
    tokenizer: Any
    mixture: MoELoraFolder | None = None
    replace: int | None = None
    always: LoraFolder | None = None

    @property
    def paths(self) -> list[str]:
        """Paths of the adapters."""
        return [adapter.path for adapter in self.adapters]

    @property
    def new(self) -> str | None:
        """Name of the expert that joins `mixture`. None for a new mixture."""
        return None if self.mixture is None else self.labels[-1 if self.replace is None else self.replace]


def open_parts(
    adapters: Sequence[str],
    labels: Sequence[str] | None = None,
    *,
    base: str | None = None,
    add_to: str | None = None,
    replace: int | None = None,
    always: str | None = None,
) -> Parts:
    """
    Open the adapters of a mixture.

    Args:
        adapters: folders or names of LoRA adapters.
        labels: names of all experts; None: names of the adapters' folders, and names in `add_to`.
        base: the adapters' base; None: the base named by the first.
        add_to: a MoE-LoRA adapter that the only adapter joins.
        replace: the expert of `add_to` that it replaces.
        always: a LoRA that serves every token.

    Raises:
        ValueError: a folder holds something else; two adapters are the same; labels are missing, repeated or too many;
            or the adapters have different bases or tokens.
    """
    loras = [open_folder(name, "adapters", LoraFolder, base=base) for name in adapters]
    mixture = None if add_to is None else open_folder(add_to, "add_to", MoELoraFolder, base=base)
    shared = None if always is None else open_folder(always, "always", LoraFolder, base=base)
    labels = expert_labels(adapters, "adapters", labels, mixture, replace)
    _check_loras(loras if shared is None else [*loras, shared])
    everything: list[AdapterFolder] = [part for part in (mixture, *loras, shared) if part is not None]
    of_all, tokenizer = _common_base(everything), everything[0].tokenizer
    check_tokenizer(tokenizer, of_all.config, everything[0])
    for part in everything[1:]:
        check_same_tokens(part, everything[0])
    warn_of_templates(everything)
    return Parts(labels, loras, of_all, tokenizer, mixture, replace, shared)


def expert_labels(
    sources: Sequence[str],
    field: str,
    given: Sequence[str] | None = None,
    mixture: MoELoraFolder | None = None,
    replace: int | None = None,
) -> list[str]:
    """
    Return the experts' names, in order.

    Args:
        sources: folders or names of the experts; an expert's default name is the last part.
        field: the setting of the sources, for messages.
        given: names to use instead.
        mixture: the mixture that the only source joins. Its experts keep their names.
        replace: the expert that the source replaces.
    """
    # The name of a folder such as "." is known after resolving it.
    names = [Path(source).name or Path(source).resolve().name for source in sources]
    count, of_whom = len(names), ""
    if mixture is not None:
        n, former = mixture.config.num_updates, mixture.config.expert_names
        if (replace or 0) >= n:
            raise InputError(f"replace={replace}: {mixture} has experts 0 to {n - 1}")
        if former is None and given is None:
            raise InputError(f"labels=None: the experts of {mixture.path!r} have no names (expert_names); give them")
        former, position = (former or [])[:n], n if replace is None else replace
        names = [*former[:position], *names, *former[position + 1 :]]
        count, of_whom = n + (replace is None), "the mixture has "
    labels = [label_text(label) for label in (names if given is None else given)]
    if not all(labels):
        raise InputError(f"labels={labels}: an expert has no name; give names (--labels)")
    if len(set(labels)) < len(labels):
        raise InputError(f"labels={labels}: two experts have the same name; give others (--labels)")
    if len(labels) != count:
        raise InputError(f"labels={labels}: {of_whom}{count} experts; give a name for each")
    places = [os.path.realpath(source) for source in sources]
    if again := [source for i, source in enumerate(sources) if places[i] in places[:i]]:
        raise InputError(f"{field}={again[0]!r}: is given twice")
    return labels


def check_plain(adapters: Sequence[AdapterFolder]) -> None:
    """Raise if an adapter has more than LoRAs on linears, which cannot become one LoRA."""
    for adapter in adapters:
        for name in ("modules_to_save", "trainable_token_indices"):
            if value := getattr(adapter.config, name):
                raise InputError(f"{adapter}: {name}={value!r}: into='lora' merges LoRAs on linears alone")


def warn_of_templates(parts: Sequence[AdapterFolder | DenseFolder]) -> None:
    """Warn if experts had different chat templates or EOS tokens in training. A mixture has the first expert's."""
    for name, what in (("chat_template", "chat template"), ("eos_token", "EOS token")):
        values = [getattr(part.tokenizer, name) for part in parts]
        for part, value in zip(parts, values, strict=True):
            if value != values[0]:
                logger.warning(
                    "%s has another %s than %s, whose %s the mixture uses: texts may not look as in its training",
                    part, what, parts[0], what,
                )  # fmt: skip


def _check_loras(loras: Sequence[LoraFolder]) -> None:
    """Raise if two LoRAs are the same. Warn if a LoRA changes nothing."""
    seen: dict[Any, LoraFolder] = {}
    for lora in loras:
        tensors = read_adapter_weights(lora.path, lora)
        if not any(tensor.any() for name, tensor in tensors.items() if ".lora_A." not in name):
            logger.warning("%s: was never trained: its B are all 0, so it answers as the base does", lora)
        identity = (hash_file(adapter_weights(lora.path, lora)), str(lora_scalings(lora.config, tensors)))
        if (other := seen.setdefault(identity, lora)) is not lora:
            raise InputError(f"{lora}: is the same LoRA as {other}; give it once")


def _common_base(adapters: Sequence[AdapterFolder]) -> WholeModel:
    """Return the base of the adapters for one mixture. Raise unless all name the same base and revision."""
    bases = [adapter.base for adapter in adapters]
    named = [base_named(base.path, base.revision) for base in bases]
    for adapter, name in zip(adapters, named, strict=True):
        if name != named[0]:
            raise InputError(
                f"{adapter}: its base is {name}, that of {adapters[0]} is {named[0]}; experts of one mixture need one "
                "base, so say which (--base)"
            )
    return bases[0]
