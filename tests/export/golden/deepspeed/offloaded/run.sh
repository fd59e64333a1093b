#!/bin/sh
# Trains by ds_config.json with DeepSpeed 0.19.6. TRAIN names your training script,
# which takes --deepspeed_config (deepspeed.add_config_arguments); arguments go to it.
#
# The plan: dp_shard8 zero3 mb1x8 parameters_on_host
# What the script decides, and has to do as planned:
#   recompute activations: none
#   no engine.compile()
#   a model too large for one device made under deepspeed.zero.Init
set -eu
: "${TRAIN:?set TRAIN, your training script}"
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
exec deepspeed --num_gpus=8 \
    "$TRAIN" --deepspeed --deepspeed_config "$here/ds_config.json" "$@"
