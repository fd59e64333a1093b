#!/usr/bin/env bash
# A built wheel works in clean environments: the core (planning with the learned search,
# exporting, running) without any extra, then the README's first examples with what the
# README's install line installs.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Compiling all of torch's files takes three times as long as installing them.
install() {
  "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --no-compile -c constraints.txt "$@"
}
absent() {
  for package in "$@"; do
    if "$work/venv/bin/python" -c "import $package" 2>/dev/null; then
      echo "$package came with the wheel, but belongs to an extra" >&2
      exit 1
    fi
  done
}

echo "== building the wheel"
.venv/bin/python -m build --wheel --outdir "$work/dist" . >"$work/build.log" 2>&1 || {
  cat "$work/build.log"
  exit 1
}
wheel=$(echo "$work"/dist/meshwright-*.whl)
echo "== installing it without extras in a clean environment"
python3 -m venv "$work/venv"
install torch
install "$wheel"
absent gymnasium stable_baselines3 transformers
cp .ci/core_model.py "$work/"
extras=$(.venv/bin/python .ci/readme_examples.py README.md "$work")
cd "$work"
export PATH="$work/venv/bin:$PATH"
echo "== planning, exporting and running from it"
meshwright plan --model core_model:build --cluster local:2 --global-batch 8 \
  --dtype float32 --out core.json
grep -q '"partitioner": "learned"' core.json
meshwright export core.json --to torchrun --out export
meshwright report core.json --model core_model:build --out report.html
meshwright run core.json --model core_model:build --steps 3
echo "== the README's first examples, installed as it says: meshwright$extras"
cd - >/dev/null
install "$wheel$extras"
absent gymnasium stable_baselines3
cd "$work"
bash -e first.sh
python first.py
echo "== the wheel stands alone"
