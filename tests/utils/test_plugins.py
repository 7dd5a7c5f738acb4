"""Modules of the user's that commands import before they read anything."""

from __future__ import annotations

import sys

import pytest

from moe_peft.routing.routers import ROUTERS
from tests.helpers.training_case import make_case, run

ROUTER = """
from moe_peft.routing.routers import ROUTERS

class Mine(ROUTERS["linear"]):
    pass

ROUTERS["mine"] = Mine
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a module in it."""
    (tmp_path / "my_router.py").write_text(ROUTER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield tmp_path
    ROUTERS.pop("mine", None)
    sys.modules.pop("my_router", None)


@pytest.mark.parametrize("flags, settings", [(["--plugins", "my_router"], {}), ([], {"plugins": ["my_router"]})])
def test_a_router_of_the_current_folder(flags, settings, folder, tokenizer, capsys):
    case = make_case(folder, tokenizer)
    run("sft", folder, {**case, **settings, "router_type": "mine"}, "--dry-run", *flags)
    assert "memory, about" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("nowhere", None, "plugins='nowhere': cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        (
            "broken",
            "def f():\n    1 / 0\nf()",
            "cannot be imported: ZeroDivisionError: division by zero (PLACE, line 2)",
        ),
        ("torn", "import json\n\njson.loads(3)", "must be str, bytes or bytearray, not int (PLACE, line 3)"),
        ("wrong", "x = (", "plugins='wrong': cannot be imported: SyntaxError: '(' was never closed (wrong.py, line 1)"),
        ("ends", "import sys; sys.exit(0)", "plugins='ends': cannot be imported: SystemExit: 0"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(name, text, message, folder, tokenizer, capsys):
    if text:
        (folder / f"{name}.py").write_text(text)
    for flags, settings in ((["--plugins", name], {}), ([], {"plugins": [name]})):
        with pytest.raises(SystemExit) as end:
            run("sft", folder, {**make_case(folder, tokenizer), **settings}, *flags)
        assert end.value.code == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and message.replace("PLACE", str(folder / f"{name}.py")) in errors[0]
