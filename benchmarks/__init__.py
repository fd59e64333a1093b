"""The figures of the README, each re-runnable: ``python -m benchmarks.NAME``."""

import os

# Benchmarks are of what they name; those of certificates ask for them.
os.environ.setdefault("MESHWRIGHT_CERTIFY", "0")
