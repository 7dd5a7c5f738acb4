"""
The versions that are installed here, as rows for docs/index.md. `make test-latest` prints them after its tests.

    python -m compatibility.versions
"""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import version

PACKAGES = ("transformers", "peft", "trl", "accelerate", "datasets", "bitsandbytes", "torchao", "lm_eval")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    import torch

    print("| package | newest version |\n|---|---|")
    print(f"| Python | {platform.python_version()} |\n| torch | {torch.__version__} |")
    for name in PACKAGES:
        print(f"| {name} | {version(name)} |")


if __name__ == "__main__":
    main()
