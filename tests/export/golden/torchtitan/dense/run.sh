#!/bin/sh
# Starts meshwright_recipe.py in torchtitan 0.3.0. Arguments go on to it.
# Model: 'llama3-8b'
# Cluster: 'h100-80 x 16'
# Strategy: pp4 dp_shard2 tp2 zero2 1F1B mb1x16 sp clip1
set -eu
# Run it once on each of 2 hosts, in order: NODE_RANK is 0 to 1.
: "${NODE_RANK:?set NODE_RANK, the number of this host}"
: "${MASTER_ADDR:?set MASTER_ADDR, the name of the first host}"
: "${MASTER_PORT:=29500}"
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
exec torchrun --nnodes=2 --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --nproc-per-node=8 \
  -m torchtitan.train --module meshwright_recipe --config meshwright "$@"
