"""Caches of keys and values in 8 or 4 bits, for models that know nothing of them."""

from . import rules as rules  # registers rules
