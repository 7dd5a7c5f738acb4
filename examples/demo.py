"""
UpIT's quickstart: what LoRA, LoRAMoE-SFT and UpIT make of one small model and three domains.

    python -m examples.demo [--out .cache/demo] [--base .cache/base] [--fast] [--verbose]

Runs `recipes/upit/quickstart.yaml` once per method, on the same data and with the same budget: an adapter is trained
through the recipe's stages, saved, reloaded and evaluated on held-out rows. It runs offline, on a CPU, in a few
minutes; if it is stopped, the same command continues where it was. `--fast` only shows that everything works: its
numbers mean nothing.
"""

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path

SEED = 0
TOLERANCE = 0.02  # how much worse than LoRA's a mixture's mean held-out loss may be
# What other packages read when they are imported; a variable that is set already keeps its value.
QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers' bars too
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TORCH_LOGS": "-all",  # errors only
}
FILE_BARS = {"TQDM_MININTERVAL": "30"}  # a file keeps every update of a bar


def set_output(verbose: bool) -> None:
    """Show our messages and bars, and other packages' only if `verbose`. Call it before they are imported."""
    if not verbose:
        for name, value in (QUIET if sys.stderr.isatty() else {**QUIET, **FILE_BARS}).items():
            os.environ.setdefault(name, value)
        warnings.simplefilter("ignore")
        logging.getLogger("torchao").setLevel(logging.ERROR)  # peft imports it where it is installed
    logging.basicConfig(format="%(message)s")
    logging.getLogger("moe_peft").setLevel(logging.DEBUG if verbose else logging.INFO)


def main() -> None:
    if not __package__:
        sys.exit("error: run this as a module, from the repository's root: python -m examples.demo")
    parser = argparse.ArgumentParser(description="LoRA, LoRAMoE-SFT and UpIT on three domains.")
    parser.add_argument("--out", type=Path, default=Path(".cache/demo"), help="for adapters and results")
    parser.add_argument("--base", type=Path, default=Path(".cache/base"), help="the base model; trained if missing")
    parser.add_argument("--fast", action="store_true", help="a few steps on a minimal model")
    parser.add_argument(
        "--verbose", action="store_true", help="show other packages' warnings, bars and all logged values"
    )
    args = parser.parse_args()
    set_output(args.verbose)
    print(
        "LoRA, LoRAMoE-SFT and UpIT learn code, prose and arithmetic on the same small base model.\n"
        f"About {'a minute' if args.fast else '8 minutes'} on two cores; if you stop it, run it again to continue.",
        flush=True,
    )
    # Only now: these imports take seconds, and what they print is set above.
    from .comparison import FAST, compare
    from .outcome import show_outcome
    from .toy.base import ensure_base
    from .toy.domains import build

    try:
        if args.fast:
            overrides, (train, test) = FAST, build(SEED, 16, 4)
            base = ensure_base(args.out / "base", SEED, hidden=32, layers=2, vocab_size=512, chars=60_000)
        else:
            overrides, (train, test) = (), build(SEED, 400, 60)
            base = ensure_base(args.base, SEED)
        outcome = compare(base, train, test, args.out, overrides)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    show_outcome(outcome, args.out, args.fast)
    means = {method: losses["mean"] for method, losses in outcome.losses.items()}
    excess = max(means[method] for method in means if method not in ("base", "LoRA")) - means["LoRA"]
    if not args.fast and excess > TOLERANCE:
        sys.exit(f"a mixture's mean held-out loss is {excess:.3f} worse than LoRA's; the limit is {TOLERANCE}")


if __name__ == "__main__":
    main()
