"""The folder that `moe-peft exec` puts first on `PYTHONPATH`."""
