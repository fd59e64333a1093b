"""Shell scripts that start Megatron-LM, read as bash would run them."""

from __future__ import annotations

from typing import Any

import pytest

from planner.errors import PlanFileError, StrategyError
from planner.imports import Imported, Wanted, import_text
from planner.imports.shell import is_script, open_variables, read_script

SCRIPT = """#!/bin/bash
# Starts a small run.
set -e
GPUS_PER_NODE=4   # of each node
NNODES=${NNODES:-"2"}
WORLD_SIZE=$(($GPUS_PER_NODE * $NNODES))
DATA_PATH=$1
TP=2
PP=$((WORLD_SIZE / TP / 2))
DTYPE="bf16"

DISTRIBUTED_ARGS="
    --nproc_per_node $GPUS_PER_NODE \\
    --nnodes $NNODES
"
MODEL_ARGS=(
    --num-layers 8   # a comment (with brackets)
    --hidden-size 512
)
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size 32)
if [[ "$DTYPE" == "bf16" ]] && [ -n "$TP" ]; then
    TRAINING_ARGS+=(--bf16)
elif [ $DTYPE = fp16 ]; then
    TRAINING_ARGS+=(--fp16)
else
    TRAINING_ARGS+=(--fp32)
fi
case "${MODE:-fast}" in
    slow) TRAINING_ARGS+=(--recompute-granularity full) ;;
    fast|quick) options="--use-distributed-optimizer" ;;
    *) echo "no"; exit 1 ;;
esac
[ $TP -gt 1 ] && sp="--sequence-parallel"
function unused() {
    TP=16
}
if [ ! -f "$DATA_PATH" ]; then
    exit 1
fi
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} "${TRAINING_ARGS[@]}" ${options} ${sp} ${missing_options} \\
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size $PP \\
    --data-path $DATA_PATH 2>&1 | tee log.txt
"""


def megatron(text: str, **wanted: Any) -> Imported:
    return import_text("megatron", text, Wanted(**wanted), "run.sh")


def test_variables_arrays_tests_and_arithmetic() -> None:
    assert is_script(SCRIPT)
    launch = read_script(SCRIPT, "run.sh")
    assert launch.processes == 8
    assert launch.program == "pretrain_gpt.py"
    assert open_variables(launch.words) == ["missing_options", "1"]
    found = megatron(SCRIPT)
    assert found.strategy.label() == (
        "pp2 dp_shard2 tp2 zero1 1F1B mb1x16 sp weight_decay0.01 clip1"
    )
    assert found.cut == (4, 4)


def test_a_script_is_started_with_words_of_its_own() -> None:
    found = megatron(SCRIPT, script_words="NNODES=1 MODE=slow DTYPE=x /data")
    strategy = found.strategy
    assert (strategy.mesh.pp, strategy.mesh.dp_replicate, strategy.mesh.tp) == (1, 2, 2)
    assert strategy.stages[0].recompute == "full"


def test_processes_of_the_user_win_over_a_placeholder() -> None:
    found = megatron(SCRIPT, world_size=16)
    assert found.strategy.mesh.num_devices == 16
    assert found.ignored[0].why == "the script starts 8; 16 are priced"


def test_values_that_a_script_leaves_open_are_asked_for_together() -> None:
    text = (
        "#!/bin/bash\ntorchrun --nproc_per_node 8 pretrain_gpt.py --bf16 "
        "--tensor-model-parallel-size ${TP} --micro-batch-size $3 --save ${OUT}\n"
    )
    with pytest.raises(StrategyError) as refused:
        megatron(text)
    assert "--tensor-model-parallel-size ${TP}, --micro-batch-size ${3}" in str(
        refused.value
    )
    assert "--save" not in str(refused.value)
    mesh = megatron(text, script_words="TP=4 a b 2").strategy.mesh
    assert (mesh.tp, mesh.dp_replicate) == (4, 2)


@pytest.mark.parametrize(
    "start",
    [
        'run_cmd="torchrun --nproc_per_node=8 train.py $A"\neval ${run_cmd}\n',
        'cmd="python -u train.py ${A}"\nsbatch <<EOF\nsrun bash -c "${cmd}"\nEOF\n',
        "python -m torch.distributed.run --nproc-per-node 8 train.py $A &> log\n",
        'srun -l sh -c "python train.py ${A}"\n',
    ],
)
def test_ways_to_start_a_trainer(start: str) -> None:
    text = f'#!/bin/bash\nA=" --micro-batch-size 1 \\\n --bf16"\n{start}'
    assert read_script(text, "run.sh").words == ("--micro-batch-size", "1", "--bf16")


def test_nothing_of_a_script_is_run(tmp_path: Any) -> None:
    mark = tmp_path / "mark"
    text = (
        f"#!/bin/bash\nX=$(touch {mark})\nY=`touch {mark}`\ntouch {mark}\n"
        "torchrun --nproc_per_node 2 a.py --micro-batch-size 1 --bf16 --seed $X\n"
    )
    assert megatron(text).strategy.mesh.dp_replicate == 2
    assert not mark.exists()


@pytest.mark.parametrize("text", ["#!/bin/bash\necho hello\n", "#!/bin/sh\nX=(\n"])
def test_a_script_without_a_trainer_is_refused(text: str) -> None:
    with pytest.raises(PlanFileError, match="starts no trainer"):
        megatron(text)


def test_arguments_take_no_words_of_a_script() -> None:
    with pytest.raises(StrategyError, match="so --args has no effect"):
        megatron("--micro-batch-size 1", world_size=1, script_words="TP=2")
