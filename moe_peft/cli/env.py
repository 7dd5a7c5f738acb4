"""`moe-peft env`: a list to paste into a bug report."""

from __future__ import annotations

import argparse
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from .. import __version__
from ..utils.compat import TESTED

PACKAGES = (
    "torch", "transformers", "peft", "trl", "accelerate", "datasets", "bitsandbytes", "deepspeed",
    "liger-kernel", "vllm",
)  # fmt: skip


def parser(prog: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog, description="Print versions and devices, for a bug report.", epilog="example:\n  moe-peft env"
    )


def run(options: argparse.Namespace) -> None:
    import torch
    from torch.torch_version import TorchVersion

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "none"
    print(f"- moe_peft: {__version__}")
    print(f"- Platform: {platform.platform()}")
    print(f"- Python: {platform.python_version()}")
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            # torch's `__version__` has the build, too: +cpu, +cu130, …
            installed = str(torch.__version__) if name == "torch" else version(name)
            newest = TESTED.get(name)
            newer = newest and TorchVersion(installed.partition("+")[0]) > newest
            print(f"- {name}: {installed}" + (f" (newer than {newest}, which was tested)" if newer else ""))
    print(f"- CUDA of torch: {torch.version.cuda or 'none'}")
    print(f"- Accelerators: {', '.join(devices) or other}")
