#!/bin/sh
# Trains by plan.nanotron.yaml with nanotron 0.4. BASE names a config of your own,
# over which it goes; TRAIN is run_train.py of its repository, or your script.
# Run it once on each of 2 hosts: NODE_RANK counts them from 0, MASTER_ADDR names
# the first. CONFIG is where the whole config is written.
set -eu
: "${BASE:?set BASE, a config of nanotron with your model, tokenizer and data}"
: "${TRAIN:=run_train.py}"
: "${CONFIG:=config.yaml}"
: "${NODE_RANK:?set NODE_RANK, 0 to 1}"
: "${MASTER_ADDR:?set MASTER_ADDR, the name of the first host}"
: "${MASTER_PORT:=29500}"
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python "$here/merge.py" "$BASE" "$here/plan.nanotron.yaml" > "$CONFIG"
# nanotron wants its communication in one order.
export CUDA_DEVICE_MAX_CONNECTIONS=1
export CUDA_VISIBLE_DEVICES=4,5,6,7
exec torchrun --nnodes=2 --node-rank="$NODE_RANK" \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --nproc-per-node=4 \
    "$TRAIN" --config-file "$CONFIG" "$@"
