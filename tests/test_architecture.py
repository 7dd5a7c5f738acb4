"""Imports flow one way, without circles: the contracts stand in `pyproject.toml`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_imports_flow_one_way_without_circles():
    """In a process of its own: the linter sets up logging for all."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
