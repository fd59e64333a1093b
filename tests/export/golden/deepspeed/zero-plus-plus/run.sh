#!/bin/sh
# Trains by ds_config.json with DeepSpeed 0.19.6. TRAIN names your training script,
# which takes --deepspeed_config (deepspeed.add_config_arguments); arguments go to it.
#
# The plan: dp_shard8 zero3 mb1x8 second_copy4 weights_in_8bits gradients_in_4bits approximate
# What the script decides, and has to do as planned:
#   recompute activations: none
#   no engine.compile()
#   a model too large for one device made under deepspeed.zero.Init
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
    "$TRAIN" --deepspeed --deepspeed_config "$here/ds_config.json" "$@"
