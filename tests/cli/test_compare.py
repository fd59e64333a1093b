"""The commands ``import`` and ``compare``: what is run today, priced beside a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from planner import predict
from planner.capture import capture
from planner.compare import Comparison, compare_with_plan
from planner.schema import Mesh, Strategy
from tests.cli.shell import ask
from tests.plans import TINY, gpt2_graph, tiny_graph

Capsys = pytest.CaptureFixture[str]
ON = ("--model", f"hf:{TINY}", "--cluster", "dgx-a100:1", "--seq-len", "32")
DEEPSPEED = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "bf16": {"enabled": True},
}


def _config(folder: Path, **changes: object) -> str:
    path = folder / "ds.json"
    path.write_text(json.dumps(DEEPSPEED | changes))
    return str(path)


def test_an_imported_config_is_priced(capsys: Capsys, tmp_path: Path) -> None:
    out = str(tmp_path / "s.json")
    words = ("deepspeed", _config(tmp_path), "--recompute", "full", "-o", out)
    answer = ask(capsys, "import", *words)
    assert answer.code == 0
    assert "ignored zero_optimization.overlap_comm: buckets" in answer.err
    priced = ask(capsys, "predict", "--strategy", out, *ON, "--json").json
    assert priced["strategy"]["mesh"]["dp_shard"] == 8
    kinds = {stage["recompute"] for stage in priced["strategy"]["stages"]}
    assert kinds == {"full"}
    assert priced["prediction"]["breakdown_s"]["recompute"] > 0


def test_megatron_is_read_from_words(capsys: Capsys) -> None:
    text = "--micro-batch-size 1 --num-layers 8 --pipeline-model-parallel-size 2"
    words = ("import", "megatron", f"--args={text}", "--world-size", "4")
    found = ask(capsys, *words, "--model", f"hf:{TINY}").json
    sizes = [len(stage["modules"]) for stage in found["stages"]]
    assert sizes == [5, 6]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["megatron"], "give a FILE, or Megatron's arguments with --args"),
        (["accelerate", "--args=x"], "--args is Megatron's; give accelerate's FILE"),
        (["deepspeed", "nowhere.json"], "cannot read config nowhere.json"),
    ],
)
def test_imports_that_name_nothing(
    capsys: Capsys, words: list[str], message: str
) -> None:
    assert message in ask(capsys, "import", *words).error


def test_both_are_laid_side_by_side(capsys: Capsys, tmp_path: Path) -> None:
    file, out = _config(tmp_path), tmp_path / "ours.json"
    found = ask(capsys, "compare", file, *ON, "--json", "-o", str(out)).json
    before, after = found["current"], found["ours"]
    assert before["workload"] == after["workload"]
    assert before["strategy"]["precision"] == after["strategy"]["precision"]
    seconds = [one["prediction"]["step_time_s"] for one in (before, after)]
    assert found["speedup"] == pytest.approx(seconds[0] / seconds[1])
    assert found["speedup"] > 1
    assert "times as fast" in found["verdict"] or "faster" in found["verdict"]
    assert "microbatch_size: 1 -> " in found["verdict"]
    assert out.exists()
    table = ask(capsys, "compare", file, *ON).out
    assert "current" in table
    assert "fullest device" in table


def test_both_are_priced_with_fused_kernels() -> None:
    config = transformers.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=2,
        vocab_size=64,
        n_positions=64,
        attn_implementation="eager",
    )
    graph = capture(transformers.GPT2LMHeadModel(config), seq_len=64)
    today = Strategy(mesh=Mesh(dp_replicate=8), microbatch_size=4)
    found = compare_with_plan(today, graph, "dgx-a100:1", kernels="fused")
    priced = predict(
        graph, "dgx-a100:1", today, target="meshwright", kernels="fused"
    ).prediction
    assert found.current.prediction == priced
    assumed = ("fused ones assumed: FlashAttention",) * 2
    assert ("kernels", *assumed) in found.rows()
    plain = compare_with_plan(today, graph, "dgx-a100:1")
    assert plain.current.prediction.step_time_s > priced.step_time_s
    assert "kernels" not in {name for name, *_ in plain.rows()}


def test_kernels_that_stand_in_for_nothing_are_told(
    capsys: Capsys, tmp_path: Path
) -> None:
    words = (_config(tmp_path), *ON, "--kernels", "fused")
    assert "--kernels fused has no effect" in ask(capsys, "compare", *words).err


def test_a_strategy_is_told_by_its_content(capsys: Capsys, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mesh: {dp_replicate: 8}\nmicrobatch_size: 4\n")
    found = ask(capsys, "compare", str(path), *ON, "--json").json
    assert found["current"]["workload"]["global_batch"] == 32
    error = ask(capsys, "compare", str(path), *ON, "--global-batch", "8").error
    assert "trains 32 samples a step, not global_batch=8" in error


def test_a_file_that_is_no_config_is_refused(capsys: Capsys, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello: there\n")
    assert "name it with --format" in ask(capsys, "compare", str(path), *ON).error


def test_what_does_not_fit_today_is_said() -> None:
    graph = gpt2_graph()
    heavy = Strategy(mesh=Mesh(dp_replicate=8), microbatch_size=8192)
    priced = predict(graph, "dgx-a100:1", heavy)
    found = compare_with_plan(priced.strategy, graph, "dgx-a100:1")
    assert found.lack_bytes > 0
    assert "The current config does not fit: the fullest device lacks" in (
        found.verdict()
    )
    assert (
        "too much" in {name: today for name, today, _ in found.rows()}["fullest device"]
    )


def test_where_nothing_is_won_it_says_so() -> None:
    found = compare_with_plan(
        Strategy(mesh=Mesh(dp_replicate=8), microbatch_size=4),
        tiny_graph(),
        "dgx-a100:1",
        target="any",
    )
    same = replace(found, current=found.ours)
    assert same.verdict() == (
        "Ours is predicted to be as fast: nothing is won in time."
    )
    assert same.lack_bytes == 0
    slow = compare_with_plan(
        Strategy(mesh=Mesh(dp_replicate=8), microbatch_size=1, num_microbatches=4),
        tiny_graph(),
        "dgx-a100:1",
        target="any",
    )
    worse = Comparison(current=slow.ours, ours=slow.current)
    assert worse.speedup < 1
    assert worse.verdict().startswith("Ours is not faster: its step is predicted")
