#!/bin/sh
# Trains by plan.nanotron.yaml with nanotron 0.4. BASE names a config of your own,
# over which it goes; TRAIN is run_train.py of its repository, or your script.
set -eu
: "${BASE:?set BASE, a config of nanotron with your model, tokenizer and data}"
: "${TRAIN:=run_train.py}"
: "${CONFIG:=config.yaml}"
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python "$here/merge.py" "$BASE" "$here/plan.nanotron.yaml" > "$CONFIG"
# nanotron wants its communication in one order.
export CUDA_DEVICE_MAX_CONNECTIONS=1
exec torchrun --standalone --nproc-per-node=8 \
    "$TRAIN" --config-file "$CONFIG" "$@"
