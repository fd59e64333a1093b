#!/bin/sh
# Starts pretrain_gpt.py of Megatron-LM core 0.19.2 with megatron.args.
# Model: 'llama3-8b'
# Cluster: 'h100-80 x 8'
# Strategy: pp2 dp_replicate2 dp_shard2 zero1 Interleaved1F1B/v4 mb1x8 selective weight_decay0.1
# Ranks: tp-cp-ep-dp-pp, Megatron's own order, innermost first, as in the plan.
# Give what the plan does not say as arguments of this script, where they win:
# sizes of the model, tokenizer, data, --train-iters, checkpoints.
# Left to Megatron-LM: selective recomputes attention cores (see --recompute-modules).
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
: "${MEGATRON:?set MEGATRON, the folder of a Megatron-LM checkout}"
args=$(tr '\n' ' ' <"$here/megatron.args")
eval "set -- $args \"\$@\""
exec torchrun --standalone --nproc-per-node=8 \
  "$MEGATRON/pretrain_gpt.py" "$@"
