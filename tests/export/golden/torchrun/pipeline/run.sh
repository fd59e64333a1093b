#!/bin/sh
# Starts plan.json on this host. Run it once on each of 4 hosts: hosts 0 to 3 of the
# cluster, in order. NODE_RANK counts them from 0, MASTER_ADDR names the first.
# Arguments go on to meshwright run.
set -eu
: "${NODE_RANK:?set NODE_RANK, 0 to 3}"
: "${MASTER_ADDR:?set MASTER_ADDR, the name of the first host}"
: "${MASTER_PORT:=29500}"
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
exec torchrun --nnodes=4 --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --nproc-per-node=8 --no-python meshwright run "$here/plan.json" "$@"
