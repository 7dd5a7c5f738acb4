"""The PEFT adapter type MOE_LORA."""

import peft  # noqa: F401  (before this package's modules: loading PEFT registers the adapter type, which imports them)
