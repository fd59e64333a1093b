#!/bin/sh
# Starts plan.json on this host. Arguments go on to meshwright run.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
exec torchrun --standalone --nproc-per-node=8 --no-python meshwright run "$here/plan.json" "$@"
