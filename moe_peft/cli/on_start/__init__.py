"""Folder that `moe-peft exec` puts first on `PYTHONPATH`."""
