#!/bin/sh
# Trains by ds_config.json with DeepSpeed 0.19.6. TRAIN names your training script,
# which takes --deepspeed_config (deepspeed.add_config_arguments); arguments go to it.
#
# The plan: dp_shard8 zero1 mb1x8 devices 4-7,12-15
# What the script decides, and has to do as planned:
#   recompute activations: none
#   no engine.compile()
#
# Run it once on each of 2 hosts: NODE_RANK counts them from 0, MASTER_ADDR
# names the first. hostfile counts devices; its names are not looked up.
set -eu
: "${TRAIN:?set TRAIN, your training script}"
: "${NODE_RANK:?set NODE_RANK, 0 to 1}"
: "${MASTER_ADDR:?set MASTER_ADDR, the name of the first host}"
: "${MASTER_PORT:=29500}"
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
exec deepspeed --hostfile="$here/hostfile" --no_ssh --node_rank="$NODE_RANK" \
    --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" \
    --include="host-0:4,5,6,7@host-1:4,5,6,7" \
    "$TRAIN" --deepspeed --deepspeed_config "$here/ds_config.json" "$@"
