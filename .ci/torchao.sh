#!/usr/bin/env bash
# Tests that need torchao, which is not in the development environment: with it there,
# transformers imports it in every process.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Compiled by pip: where tests import it first, its invalid escape sequences are errors.
.venv/bin/python -m pip install --quiet --disable-pip-version-check \
  --no-deps --target "$work" torchao==0.18.0
PYTHONPATH="$PWD:$work" .venv/bin/python -m pytest -q \
  tests/distributed/test_float8.py tests/distributed/test_optimizers.py \
  -k "float8 or 8_bits or codes" -m "not gpu"
