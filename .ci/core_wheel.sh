#!/usr/bin/env bash
# The core (planning, exporting, running) works from a built wheel without any extra:
# no torch-geometric, gymnasium, stable-baselines3, and no transformers.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "== building the wheel"
.venv/bin/python -m build --wheel --outdir "$work/dist" . >"$work/build.log" 2>&1 || {
  cat "$work/build.log"
  exit 1
}
echo "== installing it without extras in a clean environment"
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  -c constraints.txt torch
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  -c constraints.txt "$work"/dist/meshwright-*.whl
cp .ci/core_model.py "$work/"
cd "$work"
echo "== planning, exporting and running from it"
if venv/bin/python -c 'import torch_geometric' 2>/dev/null ||
  venv/bin/python -c 'import stable_baselines3' 2>/dev/null ||
  venv/bin/python -c 'import gymnasium' 2>/dev/null; then
  echo "the core pulled in the learn extra" >&2
  exit 1
fi
venv/bin/meshwright plan --model core_model:build --cluster local:2 --global-batch 8 \
  --dtype float32 --out plan.json
venv/bin/meshwright export plan.json --to torchrun --out export
venv/bin/meshwright report plan.json --model core_model:build --out report.html
venv/bin/meshwright run plan.json --model core_model:build --steps 3
echo "== the core stands alone"
