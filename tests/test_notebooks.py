"""The notebooks of the examples run from top to bottom, here with a tiny model and two steps."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.helpers.chat_model import save_chat_model
from tests.helpers.waiting import LIMIT
from tests.helpers.warm import programs

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch):
    save_chat_model(tmp_path / "tiny", 0)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    # A notebook's folder is where its kernel imports from.
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    notebook = nbformat.read(path, 4)
    for cell in notebook.cells:
        cell.source = re.sub(r"max_steps=\d+", "max_steps=2", cell.source.replace("smollm2_folder()", "'tiny'"))
    with programs(tmp_path / "bin"), tempfile.TemporaryDirectory() as sockets:
        client = NotebookClient(
            notebook, timeout=None, startup_timeout=LIMIT, resources={"metadata": {"path": str(tmp_path)}}
        )
        kernel = client.create_kernel_manager()
        # Not on ports, which may be another process's by the time that the kernel opens them.
        kernel.transport, kernel.ip = "ipc", f"{sockets}/kernel"
        client.execute()
    assert not any("error:" in text for text in printed(notebook)), printed(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_its_outputs(path: Path):
    """Of the real model, without messages of libraries."""
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and not [output for output in outputs if output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) or "text/html" in output.get("data", {}) for output in outputs)


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """What commands and cells print."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output.text for output in outputs if output.output_type == "stream" and output.name == "stdout"]
