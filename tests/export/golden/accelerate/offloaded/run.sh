#!/bin/sh
# Trains by plan.json with accelerate. Arguments go on to train.py, or to the script
# that TRAIN names.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
exec accelerate launch --config_file "$here/accelerate.yaml" \
    "${TRAIN:-$here/train.py}" "$@"
