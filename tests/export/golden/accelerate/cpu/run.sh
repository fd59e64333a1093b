#!/bin/sh
# Trains by plan.json with accelerate. Arguments go on to train.py, or to the script
# that TRAIN names.
set -eu
: "${MASTER_ADDR:=127.0.0.1}"
: "${MASTER_PORT:=29500}"
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
exec torchrun --nnodes=1 --nproc-per-node=2 \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
    --no-python accelerate launch --config_file "$here/accelerate.yaml" \
    --main_process_port "$MASTER_PORT" \
    "${TRAIN:-$here/train.py}" "$@"
