"""The least-squares merge against a plain least-squares solution in float64."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

from moe_peft import regmean
from moe_peft.utils.messages import InputError
from tests.helpers.close import assert_near
from tests.helpers.models import tiny_llama

FFN = ["gate_proj", "up_proj", "down_proj"]
CONDITION = 100  # how much the fit amplifies the rounding of its inputs: 1 / penalty at most
# Other ranks, scalings, targets, patterns.
CONFIGS = (
    {"r": 4, "lora_alpha": 8, "target_modules": FFN},
    {"r": 2, "lora_alpha": 8, "target_modules": [*FFN, "q_proj", "v_proj"], "use_rslora": True},
    {"r": 3, "target_modules": ["up_proj", "o_proj"], "rank_pattern": {"o_proj": 5}, "alpha_pattern": {"o_proj": 2}},
)


def lora(i: int, **config) -> PeftModel:
    model = tiny_llama()
    torch.manual_seed(100 + i)
    model = get_peft_model(model, LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **config))
    return model.eval()


def batch(expert: int, seed: int) -> dict[str, torch.Tensor]:
    """Texts of other words for each expert; the second one is padded."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3 + 30 * expert, 33 + 30 * expert, (2, 40), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, 25:] = 0
    return {"input_ids": ids, "attention_mask": mask, "expert": torch.full((2,), expert)}


BATCHES = [batch(expert, seed) for seed in range(3) for expert in range(4)]  # the last ones are general texts


def inputs(model, path: str, expert: int) -> torch.Tensor:
    """A linear's inputs at the real tokens of an expert's texts, in float64 [T, d]."""
    seen, module = [], model.get_submodule(path)
    hook = module.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for of_batch in BATCHES:
        if int(of_batch["expert"][0]) == expert:
            with torch.no_grad():
                model(input_ids=of_batch["input_ids"], attention_mask=of_batch["attention_mask"])
            seen[-1] = seen[-1][of_batch["attention_mask"].bool()].double()
    hook.remove()
    return torch.cat(seen)


def delta(model: PeftModel, path: str) -> torch.Tensor:
    layer = model.base_model.model.get_submodule(path)
    return layer.get_delta_weight("default").detach().double() if hasattr(layer, "lora_A") else None


def expected(path: str, loras: list, penalty: float, general: bool) -> torch.Tensor:
    """The update [out, d] that fits all LoRAs' outputs on their own inputs, by a QR least-squares solver."""
    X, Y = [], []
    for i, model in enumerate([*loras, tiny_llama().eval()][: len(loras) + general]):
        is_lora = i < len(loras)
        x = inputs(model.base_model.model if is_lora else model, path, i if is_lora else 3)
        update = delta(model, path) if is_lora else None
        y = x @ update.T if update is not None else x.new_zeros(len(x), OUT[path.rpartition(".")[2]])
        X.append(x / len(x) ** 0.5)
        Y.append(y / len(x) ** 0.5)
    X, Y = torch.cat(X), torch.cat(Y)
    ridge = penalty * (X**2).sum(0).mean()
    d = X.shape[1]
    X = torch.cat([X, ridge**0.5 * torch.eye(d, dtype=X.dtype)])
    Y = torch.cat([Y, Y.new_zeros(d, Y.shape[1])])
    return torch.linalg.lstsq(X, Y).solution.T


OUT = {"gate_proj": 128, "up_proj": 128, "down_proj": 64, "q_proj": 64, "v_proj": 32, "o_proj": 64}


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("memory", [2**32, 1])
@pytest.mark.parametrize("saved", [False, True])
def test_it_is_the_least_squares_fit_in_every_linear(general, memory, saved, tmp_path):
    loras = [lora(i, **config) for i, config in enumerate(CONFIGS)]
    adapters = loras
    if saved:
        for i, model in enumerate(loras):
            model.save_pretrained(tmp_path / str(i))
        adapters = [tmp_path / str(i) for i in range(len(loras))]
    batches = BATCHES if general else [one for one in BATCHES if int(one["expert"][0]) < 3]
    merged = regmean(tiny_llama(), adapters, batches, penalty=1e-2, memory=memory)
    paths = [path for path, module in merged.base_model.model.named_modules() if hasattr(module, "lora_A")]
    assert len(paths) == 2 * 6
    for path in paths:
        assert_near(
            delta(merged, path),
            expected(path, loras, 1e-2, general),
            path,
            terms=64 * CONDITION**2,
            dtype=torch.float32,
        )
    merged.save_pretrained(tmp_path / "merged")
    ids = BATCHES[0]["input_ids"]
    again = PeftModel.from_pretrained(tiny_llama(), tmp_path / "merged").eval()
    assert torch.equal(again(input_ids=ids).logits, merged(input_ids=ids).logits)
    assert_near(merged.merge_and_unload()(input_ids=ids).logits, again(input_ids=ids).logits)


def test_copies_of_one_lora_give_that_lora():
    """Where all agree there is nothing to fit."""
    loras = [lora(0, **CONFIGS[0]) for _ in range(2)]
    batches = [one for one in BATCHES if int(one["expert"][0]) < 2]
    merged = regmean(tiny_llama(), loras, batches, penalty=1e-9)
    for path, module in merged.base_model.model.named_modules():
        if hasattr(module, "lora_A"):
            x = inputs(loras[0].base_model.model, path, 0)
            assert_near(
                x @ delta(merged, path).T,
                x @ delta(loras[0], path).T,
                path,
                terms=64 * CONDITION**2,
                dtype=torch.float32,
            )


def test_what_it_cannot_merge():
    loras = [lora(i, **CONFIGS[0]) for i in range(2)]
    with pytest.raises(InputError, match=r"adapters\[1\]: no text is for it"):
        regmean(tiny_llama(), loras, [batch(0, 0)])
    more = lora(2, target_modules=FFN, modules_to_save=["lm_head"])
    assert any("lm_head" in name for name in get_peft_model_state_dict(more))
    with pytest.raises(InputError, match=r"adapters\[1\]: has more than LoRAs on linears"):
        regmean(tiny_llama(), [loras[0], more], [batch(0, 0), batch(1, 0)])
