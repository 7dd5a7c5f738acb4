"""`moe-peft mix`: what it prints, and options, data and folders that cannot be right."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from moe_peft.cli import main
from moe_peft.cli.mix import parser
from moe_peft.combine.mix_settings import MixSettings
from tests.helpers.bad_input import NO_ADAPTER, damaged, refused
from tests.helpers.mix_case import DOMAINS, make_case, write_lora


@pytest.fixture(scope="module")
def case(tmp_path_factory, tokenizer):
    return make_case(tmp_path_factory.mktemp("mix"), tokenizer)


def command(case, out, **changes) -> list[str]:
    options = {
        "adapters": [str(case / name) for name in DOMAINS], "data": [str(case / "data.jsonl")],
        "label-column": "domain", "output": str(out), **changes,
    }  # fmt: skip
    arguments = ["mix"]
    for name, value in options.items():
        if value is not None:
            arguments += [f"--{name}", *(value if isinstance(value, list) else [str(value)])]
    return arguments


def test_it_prints_what_reaches_its_own_and_every_loss(case, tmp_path, capsys):
    main(command(case, tmp_path / "out"))
    printed = capsys.readouterr().out
    assert "requests picked for it" in printed and printed.strip().endswith(str(tmp_path / "out"))
    report = json.loads((tmp_path / "out/mix.json").read_text())
    losses = report["losses"]
    assert all(sentence in printed for sentence in report["verdict"])
    for way, of_way in losses.items():
        row = f"{way} alone" if way in DOMAINS else way
        line = next(line for line in printed.partition("Loss")[2].splitlines() if line.startswith(f"│ {row} "))
        assert all(f"{loss:.4f}" in line for loss in of_way.values())
    out = tmp_path / "out"
    assert "mean of the adapters" in printed and "not evaluated" not in printed
    assert f"vllm serve {out}\n" in printed and f"moe-peft export --adapter {out} --output {out}-moe\n" in printed


def test_without_data_it_says_so_and_where_the_mixture_cannot_go(case, tmp_path, capsys):
    for seed, name in enumerate("ab"):
        write_lora(tmp_path / name, case / "base", seed, ["q_proj", "up_proj"])
    adapters = [str(tmp_path / name) for name in "ab"]
    options = {"adapters": adapters, "gates": "arrow", "data": None, "label-column": None}
    main(command(case, tmp_path / "out", **options))
    printed = capsys.readouterr().out
    assert "not evaluated: give --data" in printed
    assert "vLLM: vllm serve" in printed and "no export to a native MoE or GGUF: " in printed
    main(command(case, tmp_path / "mean", attention="mean", **options))
    assert "no export to a native MoE or GGUF: router_type='arrow'" in capsys.readouterr().out


def test_a_file_has_the_settings_and_flags_go_before_it(case, tmp_path):
    content = {
        "adapters": [str(case / name) for name in DOMAINS], "gates": "prompts", "top_k": 3, "plugins": [],
        "output": str(tmp_path / "out"),
        "prompts": {name: {"positive": [f"w{40 * i + 9}"]} for i, name in enumerate(DOMAINS)},
    }  # fmt: skip
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(content))
    main(["mix", "--config", str(tmp_path / "mix.yaml"), "--top-k", "1"])
    report = json.loads((tmp_path / "out/mix.json").read_text())
    assert (report["top_k"], report["gates"], report["prompts"]["a"]["positive"]) == (1, "prompts", ["w9"])


def test_every_setting_is_a_flag():
    flags = {action.dest for action in parser("mix")._actions}
    assert flags == {*MixSettings.model_fields, "config", "help"}


@pytest.mark.parametrize(
    ("arguments", "kept"), [([], None), (["--keep-sums"], True), (["--keep-sums", "false"], False)]
)
def test_a_flag_that_may_be_unset_can_be_turned_off(arguments, kept):
    given = ["--adapters", "a", "b", "--output", "out", *arguments]
    assert parser("mix").parse_args(given).keep_sums is kept


PROMPTS = json.dumps({name: {"positive": ["w3"]} for name in DOMAINS})
BAD = {
    "nothing to mix": ({"adapters": None}, "--adapters, --models: give one of the two"),
    "both": ({"models": ["x", "y"]}, "--adapters, --models: give one of the two"),
    "one adapter": ({"adapters": ["x"]}, "--adapters, --models: give two or more"),
    "gates": ({"gates": "x"}, "gates='x': must be one of ridge, prompts, arrow"),
    "no texts": ({"data": None, "label-column": None}, "gates='ridge': need texts for each expert"),
    "a column without data": ({"data": None, "gates": "arrow"}, "--label-column, --test-data, --right: go with data"),
    "one file without a column": ({"label-column": None}, "data.jsonl']: give one with --label-column"),
    "files with a column": ({"data": ["x.jsonl", "y.jsonl"]}, "y.jsonl']: give one with --label-column"),
    "too few files": (
        {"data": ["{case}/a.jsonl", "{case}/b.jsonl"], "label-column": None}, "--data: 2 files for 3 experts"
    ),
    "files in another order": (
        {"data": ["{case}/b.jsonl", "{case}/a.jsonl", "{case}/c.jsonl"], "label-column": None},
        "b.jsonl: give the files in the order of a, b, c",
    ),
    "no such file": ({"data": ["nowhere.jsonl"]}, "--data='nowhere.jsonl': no such file"),
    "no such column": ({"label-column": "x"}, "--label-column='x': --data has only"),
    "no rows of an expert": ({"adapters": ["{case}/a", "{case}/d"]}, "labels='d': must be one of a, b, c"),
    "names": ({"labels": ["a", "b"]}, "labels=['a', 'b']: 3 experts; give a name for each"),
    "equal names": ({"labels": ["a", "b", "b"]}, "two experts have the same name"),
    "equal folders": ({"adapters": ["{case}/a", "{case}/a"]}, "two experts have the same name"),
    "prompts that are not a mapping": ({"prompts": "[1]"}, "prompts=[1]: must be a mapping"),
    "prompts without a positive one": ({"prompts": '{"a": {"negative": ["w3"]}}'}, "prompts.a.positive: must be given"),
    "prompts of others": ({"prompts": '{"x": {"positive": ["w3"]}}'}, "prompts: 'x': give prompts for each of"),
    "prompts for arrow": ({"prompts": PROMPTS, "gates": "arrow"}, "--prompts: --gates='arrow' read no texts"),
    "sums of arrow": ({"gates": "arrow", "keep-sums": "true"}, "--keep-sums: --gates='arrow' have none; leave it out"),
    "top-k": ({"top-k": "4"}, "--top-k=4: must be at most the number of experts (3)"),
    "top-k of 0": ({"top-k": "0"}, "--top-k=0: must be at least 1"),
    "top-k a text": ({"top-k": "x"}, "--top-k='x': must be a valid integer"),
    "mixing": ({"mixing": "x"}, "mixing='x': must be 'output' or 'projection'"),
    "dtype": ({"dtype": "int8"}, "--dtype='int8': must be one of auto"),
    "replace alone": ({"replace": "1"}, "--replace=1: goes with --add-to"),
    "several to add": ({"add-to": "x"}, "only one can join --add-to at a time"),
    "other base": ({"base": "nowhere"}, "base='nowhere'"),
    "no LoRA": ({"adapters": ["{case}/base", "{case}/b"], "labels": ["a", "b"]}, "dense model; give a LORA adapter"),
    "models with arrow": (
        {"adapters": None, "models": ["{case}/base", "{case}/base"], "gates": "arrow"}, "are for LoRA adapters"
    ),
    "models with a mixing": ({"adapters": None, "models": ["x", "y"], "mixing": "output"}, "are for adapters; leave"),
    "models that are none": (
        {"adapters": None, "models": ["{case}/a", "{case}/b"]}, "models='{case}/a': is a LORA adapter; give"
    ),
    "keys of another program": ({"gate-mode": "hidden", "zzz": "1"}, "--gate-mode: not a setting here; instead: gates"),
    "several": ({"base_model": "x", "zzz": "1"}, "instead: base, of adapters; models need none | --zzz: unknown key"),
    "an unknown flag": ({"gate": "ridge"}, "--gate: unknown key; did you mean '--gates'?"),
    "too short": ({"max-length": "1"}, "--max-length=1: no example keeps a token to learn from"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "gates"), [("adapters", "ridge"), ("adapters", "arrow"), ("models", "prompts")])
def test_names_of_lines_and_columns_are_no_names_of_experts(kind, gates, case, tmp_path, capsys):
    """They are found in what is measured, so that none is forgotten."""
    sources = [str(case / (name if kind == "adapters" else f"dense-{name}")) for name in DOMAINS]
    own = {"adapters": None, kind: sources, "gates": gates}
    own |= {"data": [str(case / f"{name}.jsonl") for name in DOMAINS], "label-column": None}
    main(command(case, tmp_path / "out", **own, labels=[*DOMAINS]))
    losses = json.loads((tmp_path / "out/mix.json").read_text())["losses"]
    names = {*losses, *losses[f"{gates} gates"]} - {*DOMAINS}
    assert len(names) == (6 if kind == "adapters" else 4)
    for name in names:
        labels = {"labels": ["a", "b", name]}
        line = refused(command(case, tmp_path / "no", **own, **labels), capsys, tmp_path / "no")
        assert "labels=" in line and repr(name) in line


@pytest.mark.parametrize("name", BAD)
def test_bad_options_and_data_end_in_one_line(name, case, tmp_path, capsys):
    changes, message = BAD[name]
    put = {
        name: [v.format(case=case) for v in value] if isinstance(value, list) else value
        for name, value in changes.items()
    }  # fmt: skip
    line = refused(command(case, tmp_path / "out", **put), capsys, tmp_path / "out")
    assert message.replace("{case}", str(case)) in line, line


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (["--replace", "1"], "--replace=1: goes with --add-to"),
        (["--data", "a.jsonl"], "--data=['a.jsonl']: give one with --label-column, or one for each expert"),
        (["--config", "{file}"], "data=['label_column=x.jsonl']: give one with label_column, or one for each expert"),
        (["--config", "{file}", "--add-to", "a b"], "adapters=['a', 'b']: only one can join --add-to at a time"),
    ],
)  # fmt: skip
def test_messages_name_flags_where_flags_were_typed(typed, line, tmp_path, capsys):
    """A file's settings keep their names, and values theirs."""
    file = tmp_path / "mix.yaml"
    file.write_text("{adapters: [a, b], output: o, data: [label_column=x.jsonl]}")
    given = [] if "--config" in typed else ["--adapters", "a", "b", "--output", "o"]
    with pytest.raises(SystemExit):
        main(["mix", *given, *(each.format(file=file) for each in typed)])
    assert f"error: {line}" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in NO_ADAPTER if "saved whole" not in name])
def test_damaged_adapters_end_in_one_line(name, case, tmp_path, capsys):
    bad = damaged(case, "b", NO_ADAPTER[name][0], tmp_path)
    arguments = command(case, tmp_path / "out", adapters=[str(case / "a"), str(bad)], gates="arrow", data=None)
    refused([a for a in arguments if a not in ("--label-column", "domain")], capsys, tmp_path / "out")


@pytest.mark.parametrize("plugins", [[], ["fractions", "colorsys"]])
@pytest.mark.parametrize("kind", ["adapters", "models"])
def test_commands_that_follow_quote_paths_with_spaces_and_name_the_plugins(kind, plugins, case, tmp_path, capsys):
    out, flags = tmp_path / "my mixture", f" --plugins {' '.join(plugins)}" * bool(plugins)
    models = [str(case / f"dense-{name}") for name in DOMAINS]
    own = {"labels": [*DOMAINS], "adapters": None, "models": models} if kind == "models" else {}
    main([*command(case, out, **own), *flags.split()])
    printed = capsys.readouterr().out
    commands = re.findall(r"moe-peft [a-z]+ --\w.*", printed)
    of_gguf = f"moe-peft export --{kind[:-1]} '{out}' --format gguf --output '{out}.gguf'{flags}"
    assert of_gguf in commands and len(commands) == (3 if kind == "adapters" else 1)
    assert all(each.endswith(flags) for each in commands)
    if kind == "adapters":
        assert f"vLLM: vllm serve '{out}'\n" in printed
        assert f"import {', '.join(['moe_peft', *plugins])};" in printed


def test_a_mixture_without_names_asks_for_them(case, tmp_path, capsys):
    main(command(case, tmp_path / "mixed", gates="arrow", data=None, **{"label-column": None}))
    (tmp_path / "mixed/mix.json").unlink()
    config = json.loads((tmp_path / "mixed/adapter_config.json").read_text())
    assert config.pop("expert_names") == [*DOMAINS]
    (tmp_path / "mixed/adapter_config.json").write_text(json.dumps(config))
    add = {"adapters": [str(case / "d")], "add-to": str(tmp_path / "mixed"), "gates": "arrow", "data": None}
    add["label-column"] = None
    line = refused(command(case, tmp_path / "out", **add), capsys, tmp_path / "out")
    assert "labels=None" in line and "give them" in line
    line = refused(command(case, tmp_path / "out", **add, labels=["a", "d"]), capsys, tmp_path / "out")
    assert "the mixture has 4 experts; give a name for each" in line
    main(command(case, tmp_path / "out", **add, labels=["a", "b", "c", "d"]))
    assert json.loads((tmp_path / "out/mix.json").read_text())["labels"] == ["a", "b", "c", "d"]
