"""
Whether the tests of the core notice changes of its code: every mutant (an operator, an argument or a constant changed)
of a module runs against the tests that concern the module. `make mutants` runs all modules, `make mutants
MODULE=moe_peft/routing/gates.py` runs one. A run that was stopped continues where it was; mutants that survived are
tried again, because tests may have been added. Everything is kept in `.cache/mutants`. With `--every 5`, only every
fifth mutant of each function runs, for modules whose tests take long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = ROOT / ".cache" / "mutants"
# Module → files of `tests/test_….py`.
TESTS = {
    "upit/selection": "selection",
    "upit/objectives": "objectives",
    "routing/gates": "gates routing routers steering",
    "routing/statistics": "routing load variable_balance",
    "routing/expert_map": "expert_map",
    "routing/losses": "routing",
    "routing/attention_heads": "router_upcycling attention_upcycling",
    "routing/routers": "routers routing hash_router bottleneck attention_router",
    "merging": "merging",
    "adapter/sorting": "dispatch",
    "adapter/mixing": "mixing",
    "adapter/dispatch": "dispatch",
    "adapter/layer": "numerics lifecycle hash_router variable_balance steering",
    "adapter/ffn_layer": "numerics mixing dispatch lifecycle bottleneck order",
    "adapter/protocol": "protocol bases hash_router liger variable_balance lifecycle trainer trainers order",
    "upit/buckets": "buckets",
    "upit/own_updates": "own_updates router_init",
    "upit/stages": "stage_folders upit_stages",
    "native/initialise": "expert_init",
    "native/adapted": "native_export",
    "native/upcycled": "native_upcycle native_fine_grained",
    "training/router_losses": "router_losses trainer trainers label_masks variable_balance",
}
# Compiled code, other processes and new Python programs do not see which mutant is active.
NOT_RUN = " and ".join(
    f"not {word}" for word in ["killed", "recipe", "command", "compile", "process", "subprocess", "ddp", "fsdp", "cuda"]
)
# Texts of errors and the rules of arguments are left alone: `tests/test_bad_calls.py` and others have a row for each,
# and they would be most of the mutants.
LEFT_ALONE = [r"\braise \w+\(", r"\bwarnings\.warn\(", r"\blogger\.\w+\(", r"^ +check\("]
NOTICED = ("killed", "timeout", "segfault")
# Every how many mutants of a function → patterns of their names, which end with a number from 1.
SAMPLES = {1: (), 5: ("*_mutmut_*[16]",), 10: ("*_mutmut_*1",)}
NOT_RUN_CODE = 255  # pytest could not find one of the tests; mutmut takes it for a timeout


def prepare(module: str) -> Path:
    """The folder in which mutmut runs one module; the code is linked, so that its changes are seen."""
    folder = WORK / module.replace("/", ".")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("moe_peft", "tests", "benchmarks", "docs", "README.md", "pyproject.toml"):
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(ROOT / name)
    tests = [f"tests/test_{name}.py" for name in TESTS[module].split()]
    settings = {
        "source_paths": ["moe_peft"],
        "only_mutate": [f"moe_peft/{module}.py"],
        "also_copy": ["benchmarks", "docs", "README.md"],
        "pytest_add_cli_args_test_selection": [*tests, "-k", NOT_RUN],
        "pytest_add_cli_args": ["-p", "no:cacheprovider"],
        "do_not_mutate_patterns": LEFT_ALONE,
        # torch is imported once, in a server that has run nothing yet; each mutant is a fork of it.
        "process_isolation": ["forkserver"],
        "timeout_constant": ["4"],
        "timeout_multiplier": ["3"],
        "use_git_change_detection": ["false"],
        "on_dependency_change": ["ignore"],
    }
    lines = ["[mutmut]"]
    for key, values in settings.items():
        lines += (
            [f"{key} =" + "".join(f"\n    {value}" for value in values)]
            if len(values) > 1
            else [f"{key} = {values[0]}"]
        )
    (folder / "setup.cfg").write_text("\n".join(lines) + "\n")
    return folder


def verdicts(folder: Path, module: str) -> tuple[Path, dict[str, int | None]]:
    """mutmut's file of a module's mutants, and their exit codes; None is not run yet."""
    path = folder / "mutants" / "moe_peft" / f"{module}.py.meta"
    return path, json.loads(path.read_text())["exit_code_by_key"] if path.exists() else {}


def is_noticed(code: int | None) -> bool:
    from mutmut.stats import status_by_exit_code

    return code != NOT_RUN_CODE and status_by_exit_code[code] in NOTICED


def again(folder: Path, module: str) -> None:
    """Forget the verdict on what no test noticed."""
    path, codes = verdicts(folder, module)
    if not codes:
        return
    noticed = {name: code if is_noticed(code) else None for name, code in codes.items()}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"exit_code_by_key": noticed}))


def report(folder: Path, module: str) -> None:
    """A line of the table, and what each mutant that survived changes."""
    from mutmut.configuration import reset_config
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.stats import status_by_exit_code

    codes = {name: code for name, code in verdicts(folder, module)[1].items() if code is not None}
    killed = sum(is_noticed(code) for code in codes.values())
    print(f"| `moe_peft/{module}.py` | {len(codes)} | {killed} | {len(codes) - killed} |")
    reset_config()
    with contextlib.chdir(folder):
        for name, code in codes.items():
            if not is_noticed(code):
                lines = get_diff_for_mutant(name, path=Path("moe_peft", f"{module}.py")).splitlines()
                changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("---", "+++")]
                status = "not run" if code == NOT_RUN_CODE else status_by_exit_code[code]
                print(f"{name.rpartition('.')[2]}: {status}", *changed, sep="\n    ")


def mutmut(folder: Path, *arguments: str, **kwargs) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "mutmut", *arguments], cwd=folder, env=environment, check=True, **kwargs
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="files, as moe_peft/merging.py (default: all)")
    parser.add_argument(
        "--every", type=int, choices=SAMPLES, default=1, metavar="N", help="run every Nth mutant (5, 10)"
    )
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs")
    args = parser.parse_args()
    modules = [name.removeprefix("moe_peft/").removesuffix(".py") for name in args.modules] or list(TESTS)
    if unknown := set(modules) - set(TESTS):
        parser.error(f"MODULE={', '.join(unknown)}: add its tests to TESTS in {__file__}; there are {', '.join(TESTS)}")
    for module in modules:
        if args.fresh:
            shutil.rmtree(WORK / module.replace("/", "."), ignore_errors=True)
        folder = prepare(module)
        again(folder, module)
        mutmut(folder, "run", "--max-children", "1", *SAMPLES[args.every])
        report(folder, module)


if __name__ == "__main__":
    main()
