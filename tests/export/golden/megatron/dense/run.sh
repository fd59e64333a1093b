#!/bin/sh
# Starts pretrain_gpt.py of Megatron-LM core 0.19.2 with megatron.args.
# Model: 'llama3-8b'
# Cluster: 'h100-80 x 16'
# Strategy: pp4 dp_shard2 tp2 zero1 1F1B mb1x16 sp clip1
# Ranks: tp-cp-ep-dp-pp, Megatron's own order, innermost first, as in the plan.
# Give what the plan does not say as arguments of this script, where they win:
# sizes of the model, tokenizer, data, --train-iters, checkpoints.
# Left to Megatron-LM: tp splits embedding, head and loss, too.
set -eu
# Run it once on each of 2 hosts, in order: NODE_RANK is 0 to 1.
: "${NODE_RANK:?set NODE_RANK, the number of this host}"
: "${MASTER_ADDR:?set MASTER_ADDR, the name of the first host}"
: "${MASTER_PORT:=29500}"
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
: "${MEGATRON:?set MEGATRON, the folder of a Megatron-LM checkout}"
export CUDA_DEVICE_MAX_CONNECTIONS=1
args=$(tr '\n' ' ' <"$here/megatron.args")
eval "set -- $args \"\$@\""
exec torchrun --nnodes=2 --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --nproc-per-node=8 \
  "$MEGATRON/pretrain_gpt.py" "$@"
