"""The figures of the README, each re-runnable: ``python -m benchmarks.NAME``."""
