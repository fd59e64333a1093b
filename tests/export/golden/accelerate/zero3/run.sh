#!/bin/sh
# Trains by plan.json with accelerate. Arguments go on to train.py, or to the script
# that TRAIN names.
# Run it once on each of 2 hosts: NODE_RANK counts them from 0, MASTER_ADDR names
# the first.
set -eu
: "${NODE_RANK:?set NODE_RANK, 0 to 1}"
: "${MASTER_ADDR:?set MASTER_ADDR, the name of the first host}"
: "${MASTER_PORT:=29500}"
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
exec accelerate launch --config_file "$here/accelerate.yaml" \
    --machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" \
    --main_process_port "$MASTER_PORT" \
    "${TRAIN:-$here/train.py}" "$@"
