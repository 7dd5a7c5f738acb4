"""What a folder holds, from its configs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..reading import read_object
from .snippets import TASKS, adapter_snippet, model_snippet

TAGS: tuple[str, ...] = ("mixture-of-experts", "moe_peft")


@dataclass(frozen=True)
class Contents:
    """
    An adapter or a model.

    Args:
        folder: where it is.
        adapter: its `adapter_config.json`; None: it is a model.
        model: its `config.json`; of an adapter {}.
        bases: what it was made from, names or folders.
    """

    folder: Path
    adapter: dict[str, Any] | None
    model: dict[str, Any]
    bases: list[str]

    @classmethod
    def read(cls, folder: Path, base: str | os.PathLike | Sequence[str | os.PathLike] | None) -> Contents:
        """
        Args:
            base: what it was made from; None: what the adapter's config says.

        Raises:
            ValueError: the folder holds neither an adapter nor a model.
        """
        adapter, model = (_read(folder / name) for name in ("adapter_config.json", "config.json"))
        if not adapter and not model:
            raise ValueError(
                f"write_model_card: {str(folder)!r}: no adapter_config.json and no config.json; save it first"
            )
        given = (adapter or {}).get("base_model_name_or_path") if base is None else base
        bases = [os.fspath(b) for b in ([given] if isinstance(given, (str, os.PathLike)) else given or []) if b]
        return cls(folder, adapter or None, model or {}, bases)

    @property
    def is_ours(self) -> bool:
        """Whether it is an adapter of the type `MOE_LORA`."""
        return self.adapter is not None and self.adapter.get("peft_type") == "MOE_LORA"

    @property
    def num_experts(self) -> int | None:
        """A model's experts per layer."""
        return self.model.get("num_experts", self.model.get("num_local_experts"))

    @property
    def tags(self) -> list[str]:
        if self.adapter is not None:
            return ["peft", *(TAGS if self.is_ours else TAGS[1:])]
        return [*(TAGS if self.num_experts else TAGS[1:])]

    @property
    def task(self) -> str | None:
        """The hub's name of its task."""
        if self.adapter is None:
            return "text-generation"
        return TASKS.get(self.adapter.get("task_type") or "", (None, None))[1]

    @property
    def title(self) -> str:
        """It does not depend on the folder, so that the same adapter has the same card wherever it is saved."""
        bases = self.bases
        of = f" of {Path(bases[0]).name}" if len(bases) == 1 else f" of {len(bases)} models" if bases else ""
        if self.adapter is not None:
            kind = "MoE-LoRA adapter" if self.is_ours else f"{self.adapter.get('peft_type')} adapter"
            return kind + of.replace(" of ", " for ", 1)
        return ("Mixture-of-Experts" if self.num_experts else "Language model") + of

    @property
    def sentence(self) -> str:
        """What it is."""
        if self.adapter is None:
            return self._of_model()
        if not self.is_ours:
            return f"This is an adapter for PEFT, of the type `{self.adapter.get('peft_type')}`."
        if self.adapter.get("expert_type") == "bottleneck":
            return _of_experts(self.adapter, f"bottleneck experts of size {self.adapter['bottleneck_size']}")
        return _of_experts(self.adapter, f"LoRA experts of rank {self.adapter['r']}")

    @property
    def snippet(self) -> str:
        """Code that loads it."""
        if self.adapter is None:
            return model_snippet(self.model, self.folder)
        return adapter_snippet(self.adapter, self.folder, self.bases)

    @property
    def loading(self) -> str:
        """What loading needs."""
        if self.is_ours:
            return (
                "Install the package (`pip install moe-peft-hf`) and import `moe_peft` before you load. Without the "
                "import, PEFT and `pipeline` stop with `KeyError: 'MOE_LORA'`."
            )
        if "moe_peft" in self.snippet:
            return "Its routers need the package (`pip install moe-peft-hf`)."
        return "It loads without this package:"

    def _of_model(self) -> str:
        n, k, kind = self.num_experts, self.model.get("num_experts_per_tok"), self.model.get("model_type")
        if not (n and k):
            return f"This is a language model of the type `{kind}`."
        return (
            f"This is a Mixture-of-Experts (MoE) language model of the type `{kind}` with {n} experts per layer, of "
            f"which each token uses {k}."
        )


def _of_experts(config: dict[str, Any], experts: str) -> str:
    n, k = config["num_experts"], config["top_k"]
    router = f"and a router (`{config['router_type']}`) that picks {k} of them for each token"
    return (
        "This is a Mixture-of-Experts (MoE) adapter for PEFT, of the type `MOE_LORA`: every adapted module of the base "
        f"gets {n} {experts}" + (f", {router}." if n > 1 else ".")
    )


def _read(path: Path) -> dict[str, Any] | None:
    return read_object(path) if path.is_file() else None
