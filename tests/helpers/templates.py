"""Trainers write a model card with every checkpoint: after this import, jinja2 compiles each template once."""

from __future__ import annotations

from functools import lru_cache

import jinja2

jinja2.Environment.compile = lru_cache(maxsize=None)(jinja2.Environment.compile)  # type: ignore[method-assign]
