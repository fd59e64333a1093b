"""Defaults for all tests."""

from __future__ import annotations

import os

# Most tests plan for the plan's own sake; those of certificates ask for them.
os.environ.setdefault("MESHWRIGHT_CERTIFY", "0")
