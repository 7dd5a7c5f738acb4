"""The command line: help and version load nothing heavy, and invalid input ends with one line."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import moe_peft
from moe_peft import MoELoraConfig
from moe_peft.cli import COMMANDS, main
from moe_peft.native import UpcycleConfig, upcycle
from moe_peft.upit.methods import METHODS
from moe_peft.utils.compat import TESTED
from moe_peft.utils.messages import InputError
from tests.helpers.chat_model import save_chat_model
from tests.helpers.models import tiny_llama
from tests.helpers.waiting import LIMIT
from tests.helpers.warm import run_module, start

LIGHT = """
import os, sys
import moe_peft
from moe_peft.cli import COMMANDS, main
from moe_peft.utils.messages import InputError
gone = {
    "sft": "--model_name_or_path no/where --dataset_name rows.jsonl",
    "inspect": "--model no/where --data rows.jsonl",
    "mix": "--adapters no/where no/place --data a.jsonl b.jsonl --output out",
    "export": "--adapter no/where --output out",
    "upit": "--config no.yaml",
}
os.environ["HF_HUB_OFFLINE"] = "1"
helps = [[name, "--help"] for name in COMMANDS]
for arguments in [["--help"], ["--version"], *helps, *([name, *rest.split()] for name, rest in gone.items())]:
    try:
        main(arguments)
    except SystemExit as end:
        assert (end.code or 0) == (2 if arguments[-1][:2] != "--" else 0), (arguments, end.code)
    heavy = {"torch", "transformers", "peft", "trl", "datasets", "numpy"} & set(sys.modules)
    assert not heavy, (arguments, heavy)
"""


def test_help_version_and_missing_folders_load_nothing_heavy():
    result = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert f"moe-peft {moe_peft.__version__}" in result.stdout.splitlines()
    assert all(f"  {name} " in result.stdout for name in COMMANDS)
    assert len(result.stderr.splitlines()) == 5 and "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_short_help_says_what_the_complete_parser_does(command):
    module = import_module(COMMANDS[command].module, "moe_peft.cli")
    complete = module.parser(command).complete().actions
    for action in module.parser(command)._actions:
        if action.dest not in ("help", "config"):
            known = complete[action.dest]
            assert action.default in (known.default, None) and action.dest in module.USUAL
            assert (action.nargs == "?") == (known.nargs == "?" or action.dest == "bf16")
    assert f"{complete['learning_rate'].default:g}" in module.parser(command).format_help()


def test_the_program_alone_prints_its_help(capsys):
    main([])
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_terminal_and_ends_with_an_example(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    helps = {}
    for flag, longest in (("--help", 80), ("--help-all", 900)):
        with pytest.raises(SystemExit) as end:
            main([command, flag])
        text = helps[flag] = capsys.readouterr().out
        lines = text.splitlines()
        assert end.value.code == 0 and text.startswith(f"usage: moe-peft {command}")
        assert len(lines) <= longest and max(map(len, lines)) <= 80 and "(default: None)" not in text
        example = text.partition("\nexample")[2].partition(":\n")[2]
        assert f"  moe-peft {command}" in example
    if command != "exec":  # which leaves the rest to its program
        parser = import_module(COMMANDS[command].module, "moe_peft.cli").parser(f"moe-peft {command}")
        options = helps["--help"].partition("\nexample")[0].splitlines()
        shown = {flag for line in options for flag in re.findall(r"^  .*?(--[\w-]+)", line)}
        for words in re.findall(rf"moe-peft {command}\b(.*)", example.replace("\\\n", " ")):
            arguments = shlex.split(words)
            assert parser.parse_known_args(arguments)[1] == []
            assert {word for word in arguments if word.startswith("--")} <= shown


def test_help_has_the_usual_options_and_help_all_has_the_others(capsys):
    texts = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main(["sft", flag])
        texts[flag] = " ".join(capsys.readouterr().out.split())
    for title in ("Model and data", "MoE adapter", "Router losses", "Training", "Other"):
        assert all(f" {title}: " in text for text in texts.values())
    for text in texts.values():
        assert "--top_k N Experts per token. (default: 2)" in text and "--top-k" not in text
    rare = "--no_normalize_top_k Turn --normalize_top_k off."
    assert rare in texts["--help-all"] and "normalize_top_k" not in texts["--help"]


def test_upit_lists_its_methods(capsys):
    with pytest.raises(SystemExit):
        main(["upit", "--help"])
    text = capsys.readouterr().out
    assert all(", ".join(names) in text for names in METHODS.values())


def test_env_is_a_list_of_versions(monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", "2.99.0+cu999")  # metadata leaves out the build
    main(["env"])
    lines = capsys.readouterr().out.splitlines()
    newer = f"- torch: {torch.__version__} (newer than {TESTED['torch']}, which was tested)"
    assert {f"- moe_peft: {moe_peft.__version__}", newer} <= {*lines}
    assert all(line.startswith("- ") for line in lines)


def test_a_pipe_that_nobody_reads_ends_a_command_silently():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "moe_peft", "env"], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 141 and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


NOISY = """
import logging, os, sys, warnings
from moe_peft.cli import main
try:
    main(["env", "--help"])
except SystemExit:
    pass
logging.getLogger("torchao").warning("Failed to load a library")
logging.getLogger("torchao").warning("something else")
warnings.warn("will be removed in v6", FutureWarning)
warnings.warn("your data are odd")
import datasets
from transformers.utils.logging import tqdm
for _ in tqdm(range(2), desc="Loading weights"): pass
for _ in tqdm(range(2), desc="routing"): pass
datasets.Dataset.from_dict({"a": [1, 2]}).map(lambda row: row, desc="Tokenizing train dataset")
"""


@pytest.mark.slow
@pytest.mark.parametrize("loud", [False, True])
def test_noise_of_other_packages_is_hidden_unless_the_user_wants_it(loud):
    wanted = {
        "PYTHONWARNINGS": "default",
        "HF_HUB_DISABLE_PROGRESS_BARS": "0",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "0",
    }
    environment = {name: value for name, value in os.environ.items() if name not in wanted} | (wanted if loud else {})
    done = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for text in ("something else", "your data are odd", "routing: 100%"):
        assert text in done.stderr
    for text in ("will be removed", "Loading weights", "Tokenizing train dataset"):
        assert (text in done.stderr) == loud, done.stderr
    assert "Failed to load a library" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--foo"], "--foo: name a command first"),
        (["sft"], "model_name_or_path=None: name a model folder"),
        (["sft", "--model_name_or_path", "nowhere"], "dataset_name=None: name a file"),
        (["upcicle"], "command='upcicle': must be one of sft, dpo"),
        (["upit", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["upit"], "--config: must be given"),
        (["upit", "--config"], "--config: expected one argument"),
        (["upcycle", "--plugins"], "--plugins: expected at least one argument"),
        (["inspect", "--model", "nowhere", "--data", "nowhere.jsonl"], "nowhere"),
        (["upcycle", "--model", "m", "--output", "o", "--num-expert", "4"], "did you mean '--num-experts'?"),
        (
            ["upcycle", "--model", "m", "--output", "o", "--num_experts", "x"],
            "--num-experts='x': must be a valid integer",
        ),
        (["upcycle", "--model", "m", "--output", "o", "--router-init", "attention"], "calibration=None: goes with"),
        (
            ["upcycle", "--model", "m", "--output", "o", "--calibration", "x.jsonl"],
            "goes with --router-init='attention'",
        ),
        (["export", "--adapter", "nowhere", "--output", "o", "--verify", " "], "--verify"),
        (["export", "--adapter", "a", "--output", "o", "--verify", "texts.txt"], "'texts.txt': no such file"),
    ],
)
def test_wrong_input_ends_with_one_line_and_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in last and "Traceback" not in last


@pytest.mark.parametrize(
    ("command", "flags", "settings"),
    [
        ("inspect", '--model m --data d --max-length 9 --html --expert-map {"a":[0]}',
         {"model": "m", "data": "d", "max_length": 9, "html": True, "expert_map": {"a": [0]}}),
        ("prune", "--model m --output o --base b --drop [1,2]",
         {"model": "m", "output": "o", "base": "b", "drop": [1, 2]}),
        ("upcycle", "--model m n --output o --drop-rate 1 --no-weight-scaling",
         {"model": ["m", "n"], "output": "o", "drop_rate": 1, "weight_scaling": False}),
        ("mix", "--output o --adapters a b --gates arrow --top-k 1",
         {"output": "o", "adapters": ["a", "b"], "gates": "arrow", "top_k": 1}),
        ("pick", '--gate g --port 0 --max-length 9 --names {"a":"b"}',
         {"gate": "g", "port": 0, "max_length": 9, "names": {"a": "b"}}),
        ("export", "--adapter a --output o --max-shard-size 1GB",
         {"adapter": "a", "output": "o", "max_shard_size": "1GB"}),
    ],
)  # fmt: skip
def test_settings_are_flags_in_two_spellings_or_in_a_file(command, flags, settings, tmp_path):
    options, file = import_module(COMMANDS[command].module, "moe_peft.cli").parser(command), tmp_path / "file.yaml"
    file.write_text(json.dumps({**settings, "plugins": []}))
    spellings = (flags, re.sub(r"(?<=\w)-(?=\w)", "_", flags), f"--config {file}")
    made = [options.parse_args(each.split()) for each in spellings]
    assert made[0] == made[1] == made[2] and settings.items() <= made[0].model_dump().items()
    first = next(iter(settings))
    file.write_text(json.dumps({f"{first}x": 1}))
    with pytest.raises(InputError, match=f"{first}x: unknown key; did you mean '{first}'"):
        options.parse_args(["--config", str(file)])


WITHOUT = """
import sys
class Missing:
    def find_spec(name, path, target=None):
        if name == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing)
from moe_peft.cli import main
main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("pydantic", "sft --config run.yaml", "train"),
        ("datasets", "mix --adapters {0} {0} --output mix", "train"),
        ("starlette", "pick --gate {0}", "pick"),
    ],
)
def test_a_package_that_is_not_installed_is_one_line_with_its_extra(missing, arguments, extra, tmp_path):
    """Wherever a command imports it; in a process of its own, where nothing has imported it before."""
    command = [sys.executable, "-c", WITHOUT, missing, *arguments.format(tmp_path).split()]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2
    remedy = f"install the extra {extra}: pip install '.[{extra}]' in a clone of moe_peft"
    assert ended.stderr.splitlines() == [f"error: No module named '{missing}'; {remedy}"]


@pytest.mark.parametrize("rank", ["", "x"])
def test_what_is_no_number_of_a_process_is_not_taken_for_one(rank, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as end:
        main(["upcycle"])
    assert end.value.code == 2


def test_the_home_folder_is_expanded_where_results_go(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_llama().save_pretrained(tmp_path / "base")
    main(["upcycle", "--model", str(tmp_path / "base"), "--output", "~/moe", "--num-experts", "2"])
    assert (tmp_path / "moe" / "config.json").is_file()


@pytest.mark.parametrize("drop", ["false", '""'])
def test_what_is_no_list_of_experts_is_not_ignored(drop, tmp_path, capsys):
    tiny_llama().save_pretrained(tmp_path / "base")
    upcycle(tmp_path / "base", tmp_path / "moe", UpcycleConfig(num_experts=3))
    command = ["prune", "--model", str(tmp_path / "moe"), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as end:
        main([*command, "--drop", drop])
    assert end.value.code == 2 and "error: --drop" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_link_that_leads_nowhere_is_no_folder(tmp_path, capsys):
    tiny_llama().save_pretrained(tmp_path / "base")
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    with pytest.raises(SystemExit) as end:
        main(["upcycle", "--model", str(tmp_path / "base"), "--output", str(tmp_path / "out")])
    assert end.value.code == 2 and "out" in capsys.readouterr().err


@pytest.mark.slow
def test_a_backend_of_notebooks_is_not_needed():
    code = "from moe_peft.cli import main\ntry:\n    main(['inspect'])\nexcept SystemExit:\n    import matplotlib"
    environment = {**os.environ, "MPLBACKEND": "module://nowhere.backend"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_pipe_is_no_file_of_routers(tmp_path, capsys):
    tiny_llama().save_pretrained(tmp_path / "base")
    os.mkfifo(tmp_path / "routers")
    command = [
        "upcycle",
        "--model",
        str(tmp_path / "base"),
        "--output",
        str(tmp_path / "moe"),
        "--router-init",
        "given",
    ]
    with pytest.raises(SystemExit) as end:
        main([*command, "--router-weights", str(tmp_path / "routers")])
    assert end.value.code == 2 and "routers': no such file" in capsys.readouterr().err


@pytest.mark.slow
def test_results_are_printed_in_any_encoding(tmp_path):
    moe = tmp_path / "moe"
    base = tiny_llama()
    base.save_pretrained(tmp_path / "base")
    upcycle(tmp_path / "base", moe, UpcycleConfig(num_experts=3))
    arguments = ["prune", "--model", moe, "--drop", "[2]", "--output", tmp_path / "out"]
    done = run_module("moe_peft", *arguments, before=_print_ascii)
    assert done.returncode == 0, done.stderr
    assert "3 ? 2" in done.stdout


def _print_ascii() -> None:
    sys.stdout.reconfigure(encoding="ascii", errors="strict")


@pytest.mark.parametrize("command", [name for name, command in COMMANDS.items() if command.once])
def test_the_first_of_several_processes_does_the_work(command, monkeypatch):
    """torch's and accelerate's launchers number their processes; a second one would write to the same folder."""
    monkeypatch.setenv("RANK", "1")
    assert main([command]) is None  # not even the missing options are looked at
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        main([command])


@pytest.mark.slow
@pytest.mark.parametrize("launched", [{}, {"ACCELERATE_USE_DEEPSPEED": "true"}], ids=["DDP", "DeepSpeed"])
def test_the_first_process_does_not_wait_for_the_others(tmp_path, launched):
    """They have ended, and what reads texts makes training arguments, which would meet them."""
    folder, rows = save_chat_model(tmp_path / "base"), tmp_path / "rows.jsonl"
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), MoELoraConfig(num_experts=2, r=2)).save_pretrained(
        tmp_path / "adapter"
    )
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "adapter")
    rows.write_text('{"text": "one two three"}\n' * 4)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment = {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", **launched}
    paths = {"--model": tmp_path / "adapter", "--data": rows, "--output": tmp_path / "report"}
    process = start(_with, environment, ["inspect", *(str(part) for item in paths.items() for part in item)])
    process.join(LIMIT)
    ended = process.exitcode
    process.kill()
    assert ended == 0 and (tmp_path / "report/routing.json").is_file()


def _with(environment: dict[str, str], arguments: list[str]) -> None:
    os.environ.update(environment)
    main(arguments)


COMMAND = """
import argparse
from moe_peft.cli import COMMANDS, Command
COMMANDS["mine"] = {command}

def parser(prog):
    return argparse.ArgumentParser(prog)

def run(options):
    print("mine ran")
    {end}
"""


def test_a_users_command_is_one_like_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    ours = {"my_command": 'Command("my_command", "about", once=True, resumes="run it again")', "my_tuple": '("a", "b")'}
    for name, command in ours.items():
        (tmp_path / f"{name}.py").write_text(COMMAND.format(command=command, end="raise KeyboardInterrupt"))
    monkeypatch.setitem(COMMANDS, "mine", COMMANDS["env"])  # so that it goes at the end
    for name, rank, printed in (
        ("my_command", "0", ("mine ran\n", "stopped: run it again\n")),
        ("my_command", "1", ("", "")),
        ("my_tuple", "0", ("", "error: COMMANDS['mine']=('a', 'b'): must be a moe_peft.cli.Command\n")),
    ):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) if any(printed) else nullcontext():
            main(["mine", "--plugins", name])
        assert capsys.readouterr() == printed


def test_version_is_the_distributions():
    from importlib.metadata import version

    assert version("moe-peft-hf") == moe_peft.__version__


@pytest.mark.parametrize("quiet", ["before", "after", None])
def test_quiet_hides_progress(quiet, tmp_path, capsys):
    tiny_llama().save_pretrained(tmp_path / "base")
    capsys.readouterr()
    command = ["upcycle", "--model", str(tmp_path / "base"), "--output", str(tmp_path / "moe"), "--num-experts", "2"]
    main({"before": ["--quiet", *command], "after": [*command, "--quiet"], None: command}[quiet])
    shown = capsys.readouterr().err
    assert (tmp_path / "moe" / "model.safetensors").is_file()
    assert (shown == "") if quiet else ("layers" in shown and "%|" in shown)


def test_another_program_gets_its_own_quiet(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda path, command, environment: started.append(command))
    main(["exec", "--", sys.executable, "program.py", "--quiet"])
    assert started[0][1:] == ["program.py", "--quiet"]


def test_recipes_are_listed_and_copied(tmp_path, capsys):
    main(["recipes"])
    listed = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert "sft/qwen3-0.6b" in listed and "upit/paper_data" not in listed
    assert all(description.strip() for description in listed.values())
    assert listed["accelerate/zero2"].strip() == "DeepSpeed: gradients and optimizer state divided among 8 GPUs."
    main(["recipes", "upit/llama2-7b-paper", "--output", str(tmp_path / "paper")])
    assert {path.name for path in (tmp_path / "paper").iterdir()} > {"llama2-7b-paper.yaml", "paper_data.py"}
    main(["recipes", "sft/qwen3-0.6b", "--output", str(tmp_path / "new")])
    root = Path(__file__).parents[2] / "recipes" / "sft"
    for suffix in (".md", ".yaml"):
        assert (tmp_path / "new" / f"qwen3-0.6b{suffix}").read_bytes() == (root / f"qwen3-0.6b{suffix}").read_bytes()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "qwen3-0.6b.yaml").symlink_to(tmp_path / "elsewhere")
    for arguments, line in (
        (["sft/qwen3-0.6b", "--output", str(tmp_path / "new")], "exists"), (["sft/nothing"], "NAME='sft/nothing'"),
        (["sft/qwen3-0.6b", "--output", str(tmp_path / "links")], "exists"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            main(["recipes", *arguments])
        assert line in capsys.readouterr().err
