"""
Bad arguments of Python calls: each is refused in one line that names the field, the value and the remedy, before a
model, a config or a folder is changed.
"""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn
from trl import DPOConfig, SFTConfig

from moe_peft import (
    FFNLayout,
    LoadCallback,
    MoEDPOConfig,
    MoEDPOTrainer,
    MoELoraConfig,
    MoESFTConfig,
    MoESFTTrainer,
    allow_experts,
    expert_to_lora,
    fold_routers,
    force_experts,
    init_attention_routers,
    lora_to_moe,
    pin_dispatch,
    prune_experts,
    record_routing,
    register_ffn_layout,
    replace_routers,
    write_model_card,
)
from moe_peft.analysis import RoutingStatistics, classify_tokens
from moe_peft.analysis.inspect import inspect_model
from moe_peft.analysis.routing_report import write_report
from moe_peft.evaluation import TaskSettings, evaluate_model, read_scores
from moe_peft.evaluation.harness import Harness
from moe_peft.native import UpcycleConfig, export_adapter, load_routers, upcycle, verify_export
from moe_peft.routing import (
    RouterSettings,
    Steering,
    balancing_loss,
    compliance,
    expert_counts,
    label_losses,
    load_health,
    make_router,
    pad_logits,
    read_expert_map,
    top_k_gates,
    z_losses,
)
from moe_peft.training.preparation import calibration_batches
from moe_peft.upit import UpIT, expand_experts, init_router, post_train, prepare_experts
from moe_peft.upit.buckets import draw_seeds, label_buckets, perplexity_buckets, random_buckets
from moe_peft.utils.expert_merging import dare_merge, expand
from tests.helpers.models import tiny_llama
from tests.helpers.native_case import IDS, adapter, dense_model, saved
from tests.helpers.routed_models import NATIVE
from tests.helpers.words import word_tokenizer

NAN, INF, HUGE = float("nan"), float("inf"), 10**9
WHOLE = ["8", True, 2.0, NAN, INF, -1, 0, None, [1], HUGE]
NUMBER = ["8", True, NAN, INF, -1, None, [1]]
LABELS = {"label_column": "d", "expert_map": {"a": [0, 1], "b": [2, 3]}}


def quiet(**own: Any) -> dict[str, Any]:
    return {"output_dir": "unused", "report_to": "none", "use_cpu": True, "bf16": False, **own}


def refused(call: Callable[[], Any]) -> str:
    """The message of the refusal, which is one line."""
    with pytest.raises(ValueError) as raised:
        call()
    message = str(raised.value)
    assert "\n" not in message and ": " in message, message
    assert type(raised.value) in (ValueError, FileExistsError), type(raised.value)
    return message


# --- configs ----------------------------------------------------------------------------------------------------------

CONFIGS: list[tuple[Callable[..., Any], dict[str, list[Any]]]] = [
    (
        MoELoraConfig,
        {
            **dict.fromkeys(("r", "num_experts", "bottleneck_size"), WHOLE),
            "top_k": [value for value in WHOLE if value != HUGE],
            **dict.fromkeys(("lora_alpha", "router_aux_loss_coef"), NUMBER),
            **{key: [*NUMBER, 1] for key in ("lora_dropout", "router_jitter_noise")},
            **{key: ["yes", 1, None] for key in ("use_rslora", "normalize_top_k", "inference_mode")},
            "mixing": ["sum", None, 1, ["output"]],
            "target_modules": ["", [], [1], 1, True, {}, ["mlp", None], b"mlp", "*["],
            "target_projections": ["up_proj", "", [], [1], 1],
            "exclude_modules": [1, [1], "", "*["],
            "layers_to_transform": ["0", True, -1, 1.0, [], [True], [-1], [1.5]],
            "layers_pattern": [1, [1], "", "layers"],
            "modules_to_save": ["lm_head", [1], 1],
            "num_experts_pattern": [
                None,
                [],
                {"mlp": 0},
                {"mlp": True},
                {1: 2},
                {"mlp": "4"},
                {"mlp": HUGE},
                {"*[": 4},
            ],
            "rank_pattern": [None, {"mlp": 0}, {"mlp": True}, {1: 2}, {"*[": 2}, {"mlp": HUGE}],
            "alpha_pattern": [None, {"mlp": 0}, {"mlp": NAN}, {"mlp": INF}, {"mlp": True}, {"mlp": "1"}],
            "router_type": ["", None, "lin", 1, ["linear"], {}],
            "router_threshold": ["0.5", True, NAN, INF, -1, 0, 1.5, 0.5],
            "router_capacity_factor": ["1", True, NAN, INF, -1, 0, 1.0],
            "router_num_heads": ["1", True, 0, -1, 1.0, 4, HUGE],
            "router_mixture": ["mean", None, 1, [], "max"],
            "init_lora_weights": ["gauss", 1, None, 0, []],
            "expert_type": ["full", None, 1, []],
            "revision": [1],
            "base_model_name_or_path": [1],
        },
    ),
    (
        UpcycleConfig,
        {
            **dict.fromkeys(("num_experts", "granularity"), WHOLE),
            "top_k": WHOLE,
            **{
                key: [v for v in WHOLE if v != 0 or v is None]
                for key in ("num_shared_experts", "num_added_shared_experts")
            },
            "router_num_heads": [value for value in WHOLE if value is not None],
            **dict.fromkeys(
                ("noise_scale", "noise_std", "router_init_std", "router_aux_loss_coef", "noise_share", "drop_rate"),
                NUMBER,
            ),
            "family": [1, ""],
            "init": ["x", None, 1, []],
            "router_init": ["x", None, 1],
            "fine_grained_split": ["x", None, 1, "independent"],
            "router_weights": [1, ""],
            **{key: [1, "no", None] for key in ("shared_indices", "weight_scaling")},
            "dtype": ["x", 1, "float64", torch.float32],
            "max_shard_size": ["x", 1, "", "0GB", "-1GB", None, "9" * 400 + "GB"],
            "seed": ["0", True, 1.0, None, -1, 10**30],
        },
    ),
    (
        lambda **own: MoESFTConfig(**quiet(**own)),
        {
            "router_aux_loss_coef": ["x", True, NAN, INF, -1, [1]],
            **dict.fromkeys(("router_z_loss_coef", "router_label_loss_coef"), NUMBER),
            **{
                key: ["x", None, []]
                for key in ("router_balancing", "training_stage", "router_schedule", "router_label_tokens")
            },
            **{key: ["x", 1, None] for key in ("router_global_batch", "router_label_mask")},
            "label_column": [1, "", [], "d"],
            "expert_map": [1, [], {}, "x", {"a": 0}, {"a": [0]}],
        },
    ),
    (
        lambda **own: MoEDPOConfig(**quiet(**own)),
        {"router_aux_loss_coef": ["x", NAN, -1], "router_z_loss_coef": NUMBER, "router_balancing": ["x"]},
    ),
    (
        lambda **own: TaskSettings(**{"tasks": ("x",), **own}),
        {
            "tasks": [(), None, 1, "x", [1], [""]],
            "include_path": [1, "nope"],
            "num_fewshot": ["x", True, -1, 1.5, NAN],
            "batch_size": ["x", True, 0, 1.5, None],
            "limit": ["x", True, 0, -1, NAN, INF, 2.7],
            "apply_chat_template": [1, None, ""],
            "seed": ["x", True, 1.5, -1],
        },
    ),
    (
        lambda **own: FFNLayout(**{"up": "u", "down": "d", "act": "a", **own}),
        {"up": [1, None, ""], "act": ["F.nope", 1], "gate": [1], "fused": ["x"], "dropout": [1]},
    ),
]


@pytest.mark.parametrize(
    "make, field, values",
    [(make, field, values) for make, fields in CONFIGS for field, values in fields.items()],
    ids=[f"{i}-{field}" for i, (_, fields) in enumerate(CONFIGS) for field in fields],
)
def test_a_field_of_a_config_is_refused_by_its_name(make, field, values):
    for value in values:
        message = refused(lambda value=value: make(**{field: value}))
        assert field in message, (value, message)


@pytest.mark.parametrize("settings, words", [
    ({"router_type": "switch", "mixing": "projection", "top_k": 3}, "top_k=3: router_type='switch' has top_k=1"),
    ({"router_type": "soft", "top_k": 3}, "top_k=3: router_type='soft' has top_k=8"),
    ({"router_type": "hash", "router_aux_loss_coef": 0.5}, "router_aux_loss_coef=0.5: router_type='hash'"),
    ({"router_threshold": 0.5}, "router_threshold=0.5: router_type='linear' has no use for it"),
    ({"router_type": "top_p", "router_capacity_factor": 1.0}, "router_capacity_factor=1.0: router_type='top_p' has no"),
    ({"router_type": "hash", "router_jitter_noise": 0.5}, "router_jitter_noise=0.5: router_type='hash' reads"),
    ({"router_type": "hash", "normalize_top_k": False}, "normalize_top_k=False: router_type='hash' reads token ids"),
    ({"bottleneck_size": 32}, "bottleneck_size=32: LoRA experts have the rank r"),
])  # fmt: skip
def test_settings_that_a_router_does_not_read_are_refused_but_load_from_saved_adapters(settings, words):
    assert words in refused(lambda: MoELoraConfig(**settings))
    assert MoELoraConfig(**settings, inference_mode=True).router_type == settings.get("router_type", "linear")


@pytest.mark.parametrize("whole", [np.int64(4), np.int32(4), torch.tensor(4)])
def test_whole_numbers_of_other_libraries_are_saved_as_ints(whole, tmp_path):
    config = MoELoraConfig(r=whole, num_experts=whole, top_k=2, task_type="CAUSAL_LM")
    assert type(config.r) is type(config.num_experts) is int
    assert type(UpcycleConfig(num_experts=whole).num_experts) is int
    get_peft_model(tiny_llama(hidden=16, vocab=64), config).save_pretrained(tmp_path)
    loaded = PeftConfig.from_pretrained(tmp_path)
    assert (loaded.r, loaded.num_experts) == (4, 4)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


# --- calls ------------------------------------------------------------------------------------------------------------


def fingerprint(case: SimpleNamespace) -> Any:
    """The models' layers, weights, configs and flags, and all files."""
    models = []
    for model in case.models:
        modules = [(name, type(module), module.training) for name, module in model.named_modules()]
        tensors = {name: (p.sum().item(), p.requires_grad) for name, p in model.named_parameters()}
        configs = getattr(model, "peft_config", {})
        models.append(
            (modules, tensors, str(model.config), {k: str(sorted(vars(v).items())) for k, v in configs.items()})
        )
    return models, {path: path.stat().st_mtime_ns for path in case.root.rglob("*")}


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> SimpleNamespace:
    root = tmp_path_factory.mktemp("bad_calls")

    def lora(name: str, **own: Any) -> Path:
        torch.manual_seed(0)
        settings = {"r": 2, "target_modules": ["up_proj", "down_proj"], "task_type": "CAUSAL_LM", **own}
        get_peft_model(tiny_llama(hidden=16, vocab=64), LoraConfig(**settings)).save_pretrained(root / name)
        return root / name

    def moe(**own: Any) -> PeftModel:
        torch.manual_seed(0)
        settings = {"num_experts": 4, "r": 2, "task_type": "CAUSAL_LM", **own}
        return get_peft_model(tiny_llama(hidden=16, vocab=64), MoELoraConfig(**settings))

    made = SimpleNamespace(root=root, new=root / "new", file=root / "file", empty=root / "empty")
    made.file.write_text("x")
    made.empty.mkdir()
    made.dense = saved(dense_model("llama"), root / "dense")
    made.adapter = root / "adapter"
    adapter(dense_model("llama"), made.adapter, made.dense)
    made.exported = export_adapter(made.adapter, root / "exported")
    made.tokenizer = word_tokenizer(model_max_length=64)
    for folder in (made.exported, made.adapter):
        made.tokenizer.save_pretrained(folder)
    made.loras = [lora("a"), lora("b")]
    made.loras_of_another_base = [lora(kind, init_lora_weights=kind) for kind in ("pissa", "olora")]
    made.invoked = lora("alora", alora_invocation_tokens=[5, 6])
    made.other_rank, made.other_module = lora("c", r=4), lora("d", target_modules=["q_proj"])
    made.base, made.moe, made.native = tiny_llama(hidden=16, vocab=64), moe(), NATIVE["mixtral"]()
    made.attention, made.no_parameters = moe(router_type="attention"), moe(router_type="locmoe")
    made.plain = PeftModel.from_pretrained(tiny_llama(hidden=16, vocab=64), made.loras[0])
    made.models = [made.base, made.moe, made.native, made.attention, made.no_parameters, made.plain]
    made.rows = Dataset.from_list([{"text": "w3 w4 w5", "d": "a"}, {"text": "w7 w8", "d": "b"}] * 2)
    made.none = Dataset.from_list([])
    made.columns = Dataset.from_list([{"x": "w3"}])
    made.lists = Dataset.from_list([{"text": "w3 w4", "d": ["a"]}])
    made.sft = SFTConfig(**quiet(output_dir=str(root / "state"), num_train_epochs=1))
    made.pickled = shutil.copytree(made.adapter, root / "pickled")
    (made.pickled / "adapter_model.safetensors").rename(made.pickled / "adapter_model.bin")
    made.data = root / "data.jsonl"
    made.data.write_text('{"text": "w3 w4"}\n')
    return made


def adapted(case: SimpleNamespace, **settings: Any) -> Any:
    return get_peft_model(case.base, MoELoraConfig(**{"task_type": "CAUSAL_LM", "r": 2, **settings}))


def run_forced(model: Any, experts: Any) -> None:
    with force_experts(model, experts):
        model(input_ids=IDS % 64)


def run_allowed(model: Any, allowed: Any) -> None:
    with allow_experts(model, allowed):
        model(input_ids=IDS % 64)


def run_recorded(case: SimpleNamespace, current: Any = None, **settings: Any) -> None:
    with record_routing(case.moe, **settings) as statistics:
        if current is not None:
            statistics.current = current
        case.moe(input_ids=IDS % 64)


def steering(case: SimpleNamespace) -> list[tuple[Callable[[], Any], str]]:
    T, rows = torch.tensor, len(IDS)
    wrong = [
        None,
        0,
        [0, 1, 2],
        "012",
        T([0.0] * rows),
        T([True] * rows),
        T(0),
        T([[0]] * rows),
        T([]),
        np.zeros(rows, int),
    ]
    wrong_lists = [None, 0, "01", [0.0, 1.0], [True, False, True, True], ["0"], [None], [[0, 1]], {0: 1, 1: 1}]
    wrong_lists += [np.ones((rows, 4), bool), (i for i in [0, 1])]
    wrong_masks = [torch.ones(rows, 4), torch.ones(rows, 3).bool(), torch.ones(4).bool()]
    calls = [
        (lambda v=v, m=m: run_forced(m, v), "force_experts: experts_B=") for m in (case.moe, case.native) for v in wrong
    ]
    calls += [(lambda v=v: run_forced(case.moe, T(v)), "every layer has 0 to 3") for v in ([-1] * rows, [4] * rows)]
    calls += [
        (lambda v=v: run_allowed(case.moe, v), "allow_experts: allowed=") for v in [*wrong_lists, [-1, 0], [0, 4]]
    ]
    calls += [(lambda v=v: run_allowed(case.moe, v), "give bool [rows, 4]") for v in wrong_masks]
    return [*calls, (lambda: Steering(), "give one of the two")]


def models(case: SimpleNamespace) -> list[tuple[Callable[[], Any], str]]:
    batch = [{"input_ids": IDS % 64}]
    uses = {
        "fold_routers": fold_routers,
        "replace_routers": lambda model: replace_routers(model, "mlp"),
        "init_attention_routers": lambda model: init_attention_routers(model, batch),
        "force_experts": lambda model: run_forced(model, torch.tensor([0])),
        "allow_experts": lambda model: run_allowed(model, [0, 1]),
        "record_routing": lambda model: record_routing(model).__enter__(),
        "load_routers": lambda model: load_routers(model, case.exported),
        "expert_to_lora": lambda model: expert_to_lora(model, 0),
    }
    wrong = [None, "x", nn.Linear(2, 2), case.base, case.plain]
    calls = [(lambda use=use, v=v: use(v), f"{caller}: ") for caller, use in uses.items() for v in wrong]
    calls += [
        (lambda v=v: replace_routers(case.native, v), "replace_routers: router=") for v in (None, 1, {"type": "mlp"})
    ]
    for field, values in {"top_k": ["x", True, 0, -1, 1.5], "seed": ["x", True, 1.5, None, -1, 2**70]}.items():
        calls += [(lambda f=field, v=v: replace_routers(case.native, "mlp", **{f: v}), f"{field}=") for v in values]
    settings = {"threshold": 0.5, "capacity_factor": 1.0, "num_heads": 2, "mixture": "max"}
    calls += [
        (
            lambda f=f, v=v: replace_routers(case.native, RouterSettings("linear", **{f: v})),
            f"{f}={v!r}: router='linear'",
        )
        for f, v in settings.items()
    ]
    for kind, k in {"soft": 6, "switch": 1}.items():
        calls += [
            (lambda v=kind: replace_routers(case.native, v, top_k=2), f"top_k=2: router={kind!r} has top_k={k}; leave")
        ]
    for name in (1, "nope", ""):
        calls += [(lambda v=name: fold_routers(case.moe, v), f"adapter_name={name!r}")]
        calls += [(lambda v=name: expert_to_lora(case.moe, 0, None, v), f"adapter_name={name!r}")]
    for expert in ("0", True, 1.0, NAN, -1, 4, None, [0], slice(0, 1)):
        calls += [(lambda v=expert: expert_to_lora(case.moe, v), f"expert_to_lora: expert={expert}".split("=")[0])]
    calls += [(lambda v=v: expert_to_lora(case.moe, 0, v), "save_directory=") for v in (1, "", case.file / "x")]
    calls += [(lambda: fold_routers(case.native, "x"), "adapter_name='x': a native MoE has none")]
    return calls


def attention(case: SimpleNamespace) -> list[tuple[Callable[[], Any], str]]:
    ids = IDS % 64
    batches = [
        *((v, "batches=") for v in (None, 1, "x", {"input_ids": ids}, ids)),
        *(
            ([v], "batches[0]: no token ids")
            for v in (1, {}, {"ids": ids}, {"input_ids": ids.float()}, {"input_ids": ids[0]})
        ),
        *(
            ([{"input_ids": v}], "batches[0]: no token ids")
            for v in (ids.tolist(), ids.numpy(), ids.bool(), ids[:0], ids[None])
        ),
        *(([{"input_ids": v}], "the model has 0 to 63") for v in (ids + 1000, ids - 100)),
    ]
    masks = [
        torch.ones(2, 3),
        ids.tolist(),
        torch.full(ids.shape, 0.5),
        torch.full(ids.shape, NAN),
        torch.full(ids.shape, 2),
    ]
    batches += [
        ([{"input_ids": ids, "attention_mask": mask}], "attention_mask: give a tensor of 0 and 1") for mask in masks
    ]
    batches += [([], "no tokens"), ([{"input_ids": ids, "attention_mask": ids * 0}], "no tokens")]
    calls = [(lambda v=v: init_attention_routers(case.attention, v), words) for v, words in batches]
    places = [[1], ids[0], ids[:1], "x"]
    calls += [
        (lambda v=v: init_attention_routers(case.attention, [{"input_ids": ids, "position_ids": v}]), "position_ids: ")
        for v in places
    ]
    good = [{"input_ids": ids}]
    calls += [(lambda: init_attention_routers(case.native, good, adapter_name="x"), "adapter_name='x': a native MoE")]
    for value in ("x", True, 0, -1, 1.5, NAN):
        for model in (case.moe, case.native):
            calls += [(lambda v=value, m=model: init_attention_routers(m, good, num_heads=v), "num_heads=")]
    calls += [(lambda: init_attention_routers(case.attention, good, num_heads=2), "these attention routers have 4")]
    config = UpcycleConfig(router_init="attention", num_experts=4)
    calls += [
        (lambda v=v: upcycle(case.dense, case.new, config, calibration=v), "batches") for v in (1, [{}], [1], ids)
    ]
    return calls


def adapters(case: SimpleNamespace) -> list[tuple[Callable[[], Any], str]]:
    calls = [
        (lambda: adapted(case, num_experts_pattern={"mlp": 2}, top_k=3), "top_k=3"),
        (
            lambda: adapted(case, layers_to_transform=[0, 9], target_modules=["mlp"]),
            "layers_to_transform=[0, 9]: layer 9",
        ),
        (lambda: adapted(case, modules_to_save=["nothing"]), "modules_to_save: 'nothing'"),
        (lambda: adapted(case, target_modules=["mlp", "o_porj"]), "target_modules: 'o_porj' is no module"),
        (
            lambda: adapted(case, target_modules=["model.layers.0.mlp", "model.layers.9.mlp"]),
            "target_modules: 'model.layers.9.mlp' is no module",
        ),
        (
            lambda: adapted(case, target_modules=["model.layers.0.mlp", "model.layers.1.mlp"], layers_to_transform=[0]),
            "layers_to_transform=[0]: target_modules names 'model.layers.1.mlp' of another layer",
        ),
        *(
            (lambda v=v: adapted(case, exclude_modules=v), "is a part of the target 'model.layers.0.mlp'")
            for v in (["up_proj"], r".*\.up_proj")
        ),
        (lambda: adapted(case, target_modules=["embed_tokens"]), "embed_tokens"),
        (lambda: adapted(case, target_modules=["self_attn"]), "self_attn"),
        (lambda: adapted(case, target_projections=["up"]), "target_projections=['up']"),
        (lambda: get_peft_model(nn.Sequential(nn.Conv2d(3, 3, 3)), MoELoraConfig(target_modules=["0"])), "Conv2d"),
        (lambda: get_peft_model(case.native, MoELoraConfig()), "already has routed experts"),
        (lambda: get_peft_model(case.moe, MoELoraConfig()), "adapter_name='default': the model has an adapter of this"),
        *((lambda v=v: get_peft_model(case.base, MoELoraConfig(), v), "adapter_name=") for v in ("", "a.b")),
        *(
            (lambda f=f: adapted(case, **{f: {"nothing": 4}}), f"{f}: 'nothing' matches no targeted module")
            for f in ("num_experts_pattern", "rank_pattern", "alpha_pattern")
        ),
        *(
            (lambda v=v: adapted(case, task_type=v), f"task_type={v!r}: the model is a LlamaForCausalLM")
            for v in ("SEQ_CLS", "TOKEN_CLS", "SEQ_2_SEQ_LM", "QUESTION_ANS")
        ),
    ]
    lists = [None, 1, [], case.loras[0], str(case.loras[0]), [None], [1], [case.base], {"a": 1}, [""], set(case.loras)]
    calls += [(lambda v=v: lora_to_moe(case.base, v), "lora_to_moe: adapters=") for v in lists]
    folders = ["nope", case.file, case.empty, case.dense]
    calls += [(lambda v=v: lora_to_moe(case.base, [v]), f"lora_to_moe: {v}: ") for v in folders]
    calls += [(lambda v=v: lora_to_moe(v, case.loras), "lora_to_moe: model=") for v in (None, "x")]
    calls += [(lambda v=v: lora_to_moe(case.base, case.loras, v), "adapter_name=") for v in (1, "", "a.b", None)]
    for folder in case.loras_of_another_base:
        calls += [
            (lambda v=folder: lora_to_moe(case.base, [v]), f"init_lora_weights={folder.name!r}: it is to be added")
        ]
    calls += [(lambda: lora_to_moe(case.base, [case.invoked]), "alora_invocation_tokens=[5, 6]: an expert cannot")]
    settings = {"top_k": "x", "r": 4, "foo": 1, "mixing": "x", "tok_k": 1, "router_type": "x"}
    settings |= {"exclude_modules": ["layers.0.mlp"], "layers_to_transform": [0], "layers_pattern": "layers"}
    settings |= {f"{name}_pattern": {"mlp": 1} for name in ("num_experts", "rank", "alpha")}
    settings |= {"init_lora_weights": "gaussian", "bottleneck_size": 3}
    calls += [(lambda f=f, v=v: lora_to_moe(case.base, case.loras, **{f: v}), f) for f, v in settings.items()]
    calls += [(lambda: register_ffn_layout("x"), "layout='x'"), (lambda: pin_dispatch("x").__enter__(), "method='x'")]
    return calls


def checkpoints(case: SimpleNamespace) -> list[tuple[Callable[[], Any], str]]:
    new, gates = case.new, torch.zeros(8, 32)
    sources = [None, 1, [None], [case.dense, 1], case.base, {"a": 1}, [[case.dense]]]
    weights = [1, [gates, gates], {0: 1}, {0: [[1]], 1: [[1]]}, {0: gates.long(), 1: gates.long()}]
    weights += [{0: gates, 1: gates, 2: gates}, {"0": gates, "1": gates}, {0: gates, 1: gates * NAN}]
    settings = {"num_experts": HUGE, "family": "nope", "granularity": 5}
    outputs = [None, 1, [], case.file / "x", ""]
    bad = [None, 1, [case.adapter], case.base]
    texts = [None, [1], [None], 1, {"a": 1}, [["w3"]], "w3 w4", [], [""]]
    return [
        *((lambda v=v: upcycle(v, new), "upcycle: models=") for v in sources),
        *((lambda v=v: upcycle(case.dense, v), "upcycle: output_dir=") for v in outputs),
        *(
            (lambda v=v: upcycle(case.dense, new, v), "config=")
            for v in (1, "copy", {}, UpcycleConfig, MoELoraConfig())
        ),
        *((lambda v=v: upcycle(case.dense, new, None, v), "router_weights") for v in weights),
        *((lambda f=f, v=v: upcycle(case.dense, new, UpcycleConfig(**{f: v})), f) for f, v in settings.items()),
        (
            lambda: upcycle(case.dense, new, UpcycleConfig(router_init_std=0.5), {0: gates, 1: gates}),
            "router_init_std=0.5: the gates are given",
        ),
        *((lambda v=v: export_adapter(v, new), "export: adapter=") for v in bad),
        *((lambda v=v: export_adapter(case.adapter, v), "export: output_dir=") for v in outputs),
        *((lambda v=v: export_adapter(case.adapter, new, v), "export: base=") for v in (1, case.base, ["x"], "")),
        *((lambda v=v: export_adapter(case.adapter, new, max_shard_size=v), "max_shard_size=") for v in (1, 0, None)),
        *((lambda v=v: export_adapter(case.adapter, new, dtype=v), "dtype=") for v in ("x", 1, torch.float32)),
        *((lambda v=v: verify_export(v, case.exported, ["w3"]), "adapter=") for v in (None, 1)),
        *((lambda v=v: verify_export(case.adapter, v, ["w3"]), "exported=") for v in (None, 1, "", case.adapter)),
        *((lambda v=v: verify_export(case.adapter, case.exported, v), "text") for v in texts),
        *(
            (lambda v=v: verify_export(case.adapter, case.exported, ["w3"], dtype=v), "dtype=")
            for v in ("x", 1, None, "float99", "nn", torch.float32)
        ),
        *((lambda v=v: verify_export(case.adapter, case.exported, ["w3"], v), "base") for v in (1, "nope")),
        (lambda: verify_export(case.pickled, case.exported, ["w3"]), "only safetensors are read"),
        *((lambda v=v: load_routers(case.native, v), "load_routers: folder=") for v in (None, 1, "")),
        *(
            (lambda v=v: prune_experts(case.adapter, new, drop=v), "prune: drop=")
            for v in ({0: [1], "0": [2]}, {"0": [1], "00": [2]}, 1, "1", [-1], [True], {"x": [1]})
        ),
        *(
            (lambda f=f, v=v: prune_experts(case.adapter, new, data=str(case.data), **{f: v}), f"prune: {f}=")
            for f in ("batch_size", "max_length", "max_examples")
            for v in ("8", True, 2.5, NAN, INF, 0, [1])
        ),
        *((lambda v=v: prune_experts(v, new, drop=[0]), "prune: model=") for v in [*bad, ""]),
        *((lambda v=v: prune_experts(case.adapter, v, drop=[0]), "prune: output_dir=") for v in outputs),
        *((lambda v=v: prune_experts(case.adapter, new, data=v), "prune: data=") for v in (1, [], {}, "")),
        *(
            (lambda v=v: prune_experts(case.adapter, new, merge_twins=v), "merge_twins=")
            for v in ("x", True, NAN, 0, 2)
        ),
        *(
            (lambda v=v: prune_experts(case.adapter, new, drop=[0], experts_per_layer=v), "experts_per_layer=")
            for v in ("x", True, 0, 2.0, NAN)
        ),
        *(
            (lambda v=v: prune_experts(case.adapter, new, data=str(case.data), min_load=v), "min_load=")
            for v in ("x", True, NAN, 1, -1)
        ),
        *((lambda v=v: write_model_card(v), "write_model_card: folder=") for v in (None, 1, case.base, "")),
        *(
            (lambda f=f, v=v: write_model_card(case.adapter, **{f: v}), f"write_model_card: {f}=")
            for f in ("training", "datasets", "tags")
            for v in ("abc", 1, [1], None)
        ),
        *(
            (lambda f=f, v=v: write_model_card(case.adapter, **{f: v}), f"write_model_card: {f}=")
            for f, v in {"base": 1, "made": 1, "title": [], "repo": 1, "overwrite": "x"}.items()
        ),
    ]


def reports(case: SimpleNamespace) -> list[tuple[Callable[[], Any], str]]:
    def inspected(**own: Any) -> Any:
        return inspect_model(**{"model_path": str(case.adapter), "data": str(case.data), "output_dir": case.new, **own})

    def evaluated(**own: Any) -> Any:
        settings = TaskSettings(tasks=("nope",))
        return evaluate_model(**{"model_path": str(case.adapter), "settings": settings, "output_dir": case.new, **own})

    def counted(**own: Any) -> Any:
        return RoutingStatistics(**{"sizes": [4, 4], "k": 2, **own})

    logits, mask = [torch.randn(10, 4)] * 2, torch.ones(2, 5)
    tables: list[tuple[Callable[..., Any], str, dict[str, list[Any]]]] = [
        (
            inspected,
            "inspect",
            {"model_path": [None, 1, ""], "data": [None, 1, []], "output_dir": [None, 1, case.file]},
        ),
        (
            inspected,
            "inspect",
            {"quantization": [1, "x"], "position_width": ["x", True, 0, 1.5, NAN], "html": [1, "x"]},
        ),
        (
            inspected,
            "inspect",
            {f: ["8", True, 2.5, NAN, INF, 0, [1]] for f in ("batch_size", "max_length", "max_examples")},
        ),
        (inspected, "inspect", {"suffix": ["x", ".doc", 1, None, ""], "label_column": [1, ""]}),
        (
            evaluated,
            "evaluate_model",
            {"settings": [None, 1, "x", {}], "output_dir": [None, 1], "model_path": [None, 1]},
        ),
        (evaluated, "evaluate_model", {"with_base": ["no", 1, None], "each_expert": ["no", 1, None]}),
        (
            evaluated,
            "evaluate_model",
            {"experts": [1, "0", [], [True], [0.5], [-1], [10**30]], "suffix": [1, "x"], "base": [1]},
        ),
        (counted, "", {"sizes": [None, 1, [], [0], ["4"], [-1], [True]], "k": ["x", True, 0, 5, -1, 1.5, None]}),
        (counted, "", {"domains": [(), "abc", 1, [[]], ["a", "a"], [1, "1"]]}),
        (counted, "", {"position_width": [0, True, 1.5, 2**63]}),
        (lambda **own: Harness(**own), "Harness", {"settings": ["x", None, {}]}),
        (
            lambda **own: run_recorded(case, **own),
            "",
            {
                "domains": [None, 1, "abc", [], ["a", "a"], [None], {"a": 1}],
                "token_classes": [
                    1,
                    [],
                    torch.zeros(64),
                    torch.full((64,), 9),
                    torch.zeros(1).long(),
                    np.zeros(64, int),
                ],
                "expert_map": [1, [], {}, {"all": []}, {"all": [9]}, {"all": "01"}, {"x": [0]}, {"all": [0.5]}],
                "position_width": ["x", True, 0, -1, 1.5, NAN, INF],
            },
        ),
        (lambda **own: LoadCallback(**{"output_dir": case.new, **own}), "LoadCallback", {"every": WHOLE[:-1]}),
        (
            lambda **own: LoadCallback(**{"output_dir": case.new, **own}),
            "LoadCallback",
            {"suffix": ["png", 1, None, ""]},
        ),
        (lambda **own: LoadCallback(**own), "LoadCallback", {"output_dir": [None, 1, case.file]}),
        (lambda **own: classify_tokens(case.tokenizer, **own), "classify_tokens", {"size": ["x", 0, -1, 1.5, True]}),
    ]
    calls = [
        (lambda make=make, f=field, v=v: make(**{f: v}), f"{caller}: {field}=" if caller else field)
        for make, caller, fields in tables
        for field, values in fields.items()
        for v in values
    ]
    return [
        *calls,
        *((lambda v=v: run_recorded(case, v), "no such domain") for v in ("x", ["x"] * len(IDS), 1, {})),
        (lambda: run_recorded(case, ["all"]), "current names 1 domains"),
        (lambda: counted(domains=["a"], expert_map={"a": [0]}).mean_compliance("b"), "no such domain"),
        (lambda: counted().update([], mask, None), "0 layers of logits"),
        (lambda: counted().update(logits[:1], mask, None), "1 layers of logits"),
        (lambda: counted().update(logits, torch.ones(3, 5), None), "mask [3, 5]"),
        (lambda: write_report(None, case.new), "statistics=None"),
        (lambda: write_report(counted(), case.new), "no token was seen"),
        (lambda: classify_tokens("x"), "tokenizer='x'"),
        *((lambda v=v: read_scores(v), "read_scores: results=") for v in (None, 1, {}, {"results": {}}, [])),
    ]


def tensors(case: SimpleNamespace) -> list[tuple[Callable[[], Any], str]]:
    def lora(seed: int = 0, **own: Any) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        sizes = {"a.lora_A.weight": (2, 4), "a.lora_B.weight": (5, 2)}
        return {**{name: torch.randn(*size, generator=generator) for name, size in sizes.items()}, **own}

    def other(tensor: Any) -> list[Any]:
        return [lora(0), {**lora(1), "a.lora_A.weight": tensor}]

    pair, x, layers = [lora(0), lora(1)], torch.randn(6, 4), [torch.randn(6, 4)] * 2
    lists = [None, 1, [], [None], ["a", "b"], lora(), "ab"]
    unequal = [[lora(), {}], other(torch.ones(3, 4)), other(torch.ones(2, 4).half()), [lora(), lora(1, z=x)]]
    wrong = [other(torch.full((2, 4), NAN)), other(torch.ones(2, 4).long()), other([[1]]), [{}, {}]]
    settings = {
        "num_experts": ["x", True, 0, 2.5, 3.0, NAN, INF, HUGE], "method": ["x", None, 1, []], "merge": [1, None],
        "similarity": ["x", None, 1, []], "drop_rate": ["x", True, NAN, 1.0, -0.1, None], "initial": [1],
        "seed": ["x", True, 1.5, None, -1, 2**70],
    }  # fmt: skip
    dare = {"alpha": ["x", NAN, -1, 2, None], "drop_rate": ["x", NAN, 1.0, -0.1, None], "generator": [None, 1]}
    ok = {"a": pair[0], "b": pair[1], "alpha": 0.5, "drop_rate": 0.2, "generator": torch.Generator()}
    away = {"similarity": "displacement"}
    return [
        *((lambda v=v: expand(v, 3), "expand: experts=") for v in lists),
        *((lambda v=v: expand(v, 3), "experts[1] differs from experts[0]") for v in unequal),
        *((lambda v=v: expand(v, 3), "expand: experts[") for v in wrong),
        *(
            (lambda f=f, v=v: expand(pair, **{"num_experts": 3, f: v}), f"expand: {f}=")
            for f in settings
            for v in settings[f]
        ),
        (lambda: expand([{"a": x}, {"a": -x}], 3), "similarity='update': the experts have no lora_A"),
        *((lambda v=v: expand(pair, 3, **away, initial=v), "expand: initial differs") for v in ({"x": x}, {})),
        *((lambda f=f, v=v: dare_merge(**{**ok, f: v}), f"dare_merge: {f}=") for f in dare for v in dare[f]),
        *((lambda v=v: dare_merge(**{**ok, "b": v}), "dare_merge: ") for v in (None, {}, {"x": x}, other(x)[1])),
        *((lambda v=v: top_k_gates(x, v), "top_k=") for v in (0, -1, 5, 1.5, "x", None, True, NAN)),
        *((lambda v=v: balancing_loss(layers, v), "top_k=") for v in (0, 9, 1.5, "x")),
        (lambda: balancing_loss(layers, 2, scope="x"), "scope='x'"),
        *((lambda v=v: balancing_loss(layers, 2, v), "mask_T has shape") for v in (torch.ones(5), torch.ones(2, 3))),
        *((lambda v=v: z_losses(v), "router_logits: shapes") for v in ([], [x, torch.randn(6, 3)])),
        *(
            (lambda v=v: label_losses(layers, v), "label_losses: allowed_TN is")
            for v in (torch.ones(5, 4).bool(), torch.ones(6, 4).long(), torch.ones(6, 3).bool())
        ),
        *((lambda v=v: compliance(v, torch.ones(5, 4)), "compliance: allowed_TN") for v in ([], layers)),
        (lambda: expert_counts(x, None, 9), "top_k=9"),
        (lambda: expert_counts(x, torch.ones(5), 2), "mask_T has shape [5]"),
        (lambda: pad_logits(x, 3), "pad_logits: n=3"),
        *((lambda v=v, s=s: load_health(v, s), "sizes=") for v, s in ((torch.ones(2, 4), [4]), (torch.ones(0, 4), []))),
        *((lambda v=v: load_health(torch.ones(1, 4), v), "sizes=") for v in ([9], [0])),
        *((lambda v=v: read_expert_map({"a": [0]}, v, "t"), "num_experts=") for v in ("x", 0, -1, 1.5, None)),
        *((lambda v=v: make_router(v, 4, RouterSettings()), "hidden_size=") for v in ("x", 0, -1, 1.5, True)),
        *((lambda v=v: make_router(8, v, RouterSettings()), "num_experts=") for v in ("x", 0, -1, 1.5, True)),
        *((lambda v=v: make_router(8, 4, v), "settings=") for v in (None, 1, RouterSettings("x"))),
        *(
            (lambda v=v: perplexity_buckets(v), "perplexity_SN=")
            for v in (None, [[1.0]], torch.ones(3), -x, torch.ones(3, 0))
        ),
        *((lambda v=v: perplexity_buckets(x.exp(), v), "capacity=") for v in ("x", 0, 1.5, True)),
        *((lambda v=v: random_buckets(v, 2, 0), "examples=") for v in (-3, "x", True)),
        *((lambda v=v: random_buckets(3, v, 0), "num_experts=") for v in (0, "x")),
        *((lambda v=v: label_buckets(v, 2), "labels=") for v in (None, "ab")),
        *((lambda v=v: draw_seeds(case.rows, v, 0), "count=") for v in (0, -1, "x", 1.5, True)),
        (lambda: draw_seeds([1], 1, 0), "dataset=[1]"),
        (lambda: draw_seeds(case.rows, 1, "x"), "seed='x'"),
    ]


def training(case: SimpleNamespace) -> list[tuple[Callable[[], Any], str]]:
    def trainer(rows: Any = None, **own: Any) -> Any:
        args = MoESFTConfig(**quiet(output_dir=str(case.root / "state")))
        given = {"model": case.moe, "args": args, "processing_class": case.tokenizer, **own}
        return MoESFTTrainer(train_dataset=case.rows if rows is None else rows, **given)

    def dpo(rows: Any) -> Any:
        args = DPOConfig(**quiet(output_dir=str(case.root / "state")))
        return MoEDPOTrainer(model=case.moe, args=args, train_dataset=rows, processing_class=case.tokenizer)

    stage = {"dataset": case.rows, "args": case.sft, "processing_class": case.tokenizer}
    lora = LoraConfig(r=2, target_modules=["up_proj"], task_type="CAUSAL_LM")
    prepare = {**stage, "model": case.base, "lora_config": lora, "output_dir": case.new, "num_experts": 1}
    shared: dict[str, list[Any]] = {
        "model": [None, 1, "x"], "dataset": [None, 1, []], "args": [None, 1, {}], "processing_class": [1, "x"],
    }  # fmt: skip
    count: list[Any] = ["x", True, 0, -1, 1.5, NAN]
    folders: list[Any] = [None, 1, case.file]
    tables: list[tuple[Callable[..., Any], str, dict[str, Any], dict[str, list[Any]]]] = [
        (
            prepare_experts,
            "prepare_experts",
            prepare,
            {**shared, "output_dir": folders, "selection": ["x", None, 1, []]},
        ),
        (prepare_experts, "prepare_experts", prepare, {"num_experts": count, "num_checkpoints": count}),
        (prepare_experts, "prepare_experts", prepare, {"lora_config": [1, "x", MoELoraConfig()]}),
        (init_router, "init_router", {**stage, "model": case.moe}, {**shared, "alpha": ["x", NAN, -1, 2, None, True]}),
        (
            init_router,
            "init_router",
            {**stage, "model": case.moe},
            {"capacity": count, "train_experts": ["x", 1, None]},
        ),
        (init_router, "init_router", {**stage, "model": case.moe}, {"label_column": [1], "buckets": [None, 1, []]}),
        (
            post_train,
            "post_train",
            {**stage, "model": case.moe, "output_dir": case.new},
            {**shared, "output_dir": folders, "train_experts": ["x", None], "callbacks": [1, ["x"]]},
        ),
        (
            expand_experts,
            "expand_experts",
            {"experts": case.loras, "output_dir": case.new, "num_experts": 3},
            {
                "experts": [None, 1, [], [1], [None], str(case.loras[0]), [""]],
                "output_dir": folders,
                "num_experts": [*count, HUGE],
                "drop_rate": ["x", NAN, 1.0, -1, True],
                "seed": ["x", True, None, -1, 1.5],
                "initial": [1],
            },
        ),
        (
            lambda **own: calibration_batches(**own),
            "calibration_batches",
            {"dataset": case.rows, "processing_class": case.tokenizer},
            {
                "dataset": [None, 1, []],
                "max_examples": count,
                "batch_size": count,
                "max_length": count,
                "seed": ["x", True],
            },
        ),
        (lambda **own: UpIT(**own), "UpIT", {}, {"recipe": [None, 1, "x", {}]}),
    ]
    calls = [
        (lambda make=make, ok=ok, f=field, v=v: make(**{**ok, f: v}), f"{caller}: {field}=")
        for make, caller, ok, fields in tables
        for field, values in fields.items()
        for v in values
    ]
    for rows, words in ((case.none, "no examples"), (case.columns, "columns ['x']: needs")):
        for make, _, ok, _ in (tables[0], tables[3], tables[6]):
            calls += [(lambda make=make, ok=ok, v=rows: make(**{**ok, "dataset": v}), words)]
        calls += [(lambda v=rows: trainer(v), words), (lambda v=rows: dpo(v), words)]
    labelled = MoESFTConfig(**quiet(output_dir=str(case.root / "state"), **LABELS))
    others = [case.other_rank, case.other_module]
    return [
        *calls,
        *((lambda v=v: trainer(args=v), "MoESFTTrainer: args=") for v in (1, {"a": 1}, DPOConfig(**quiet()))),
        *((lambda v=v: trainer(model=v), "MoESFTTrainer: model=") for v in (None, 1, nn.Linear(2, 2), "")),
        (lambda: trainer(case.lists, args=labelled), "label_column='d': the train dataset has lists there"),
        (lambda: init_router(**{**stage, "model": case.no_parameters}), "no parameters"),
        *(
            (
                lambda v=v: expand_experts([v], output_dir=case.new, num_experts=2),
                "adapter_config.json",
            )
            for v in ("nope", case.file, case.empty)
        ),
        *(
            (
                lambda v=v: expand_experts(
                    case.loras, output_dir=case.new, num_experts=3, similarity="displacement", initial=v
                ),
                "expand: initial differs",
            )
            for v in others
        ),
        *(
            (
                lambda v=v: expand_experts(case.loras, output_dir=case.new, num_experts=3, initial=v),
                "adapter_config.json",
            )
            for v in ("nope", case.empty)
        ),
    ]


@pytest.mark.parametrize(
    "calls", [steering, models, attention, adapters, checkpoints, reports, tensors, training], ids=lambda f: f.__name__
)
def test_a_call_is_refused_and_nothing_has_changed(case, calls):
    before = fingerprint(case)
    for i, (call, words) in enumerate(calls(case)):
        message = refused(call)
        assert words in message, (i, words, message)
        assert fingerprint(case) == before, (i, message)
