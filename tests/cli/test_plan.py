"""``meshwright plan`` and ``predict``: what they print, write and refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from planner.schema import Plan
from tests.cli.shell import ask, meshwright
from tests.plans import TINY, gpt2_plan, local_plan

MODEL = ("--model", f"hf:{TINY}", "--seq-len", "32")
SMALL = (*MODEL, "--cluster", "dgx-a100:1")


def test_plan_prints_a_summary_and_writes_the_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    answer = ask(capsys, "plan", *SMALL, "--global-batch", "64", "-o", path)
    assert answer.code == 0
    plan = Plan.load(path)
    assert answer.out == plan.summary() + "\n"
    assert answer.err == f"wrote {path}\n"
    assert plan.workload.global_batch == 64
    assert plan.workload.seq_len == 32
    assert plan.model.ref == f"hf:{TINY}"
    assert plan.cluster.ref == "dgx-a100"


def test_plan_as_json_is_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(capsys, "plan", *SMALL, "--global-batch", "64", "--json")
    assert answer.err == ""
    again = ask(capsys, "plan", *SMALL, "--global-batch", "64", "--json")
    bytes_ = Plan.from_data(answer.json).canonical_bytes()
    assert bytes_ == Plan.from_data(again.json).canonical_bytes()


def test_the_line_of_the_readme_is_read_as_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def record(model: str, cluster: str, **options: Any) -> Plan:
        asked.update(options, model=model, cluster=cluster)
        return gpt2_plan()

    monkeypatch.setattr("planner.api.plan", record)
    line = (
        "plan --model llama3-405b --cluster dgx-h100:2048 --global-batch 2048 "
        "--seq-len 8192 --json"
    )
    assert ask(capsys, *line.split()).json == gpt2_plan().to_data()
    assert asked["model"] == "llama3-405b"
    assert asked["cluster"] == "dgx-h100:2048"
    assert asked["global_batch"] == 2048
    assert asked["seq_len"] == 8192
    assert asked["pin"] == {}
    assert asked["precision"] is None


def test_options_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--global-batch 64 --pin pp=2 --pin schedule=1F1B --pin recompute=full "
        "--dtype float32 --parameter-dtype float32 --optimizer SGD --seed 3 "
        "--learning-rate 0.01 --grad-clip-norm 1.5 --memory-fraction 0.5 "
        "--evaluation-budget 20 --partitioner expert --objective memory --json"
    )
    plan = Plan.from_data(ask(capsys, "plan", *SMALL, *words.split()).json)
    strategy, provenance = plan.strategy, plan.provenance
    assert strategy.mesh.pp == 2
    assert strategy.schedule == "1F1B"
    assert {stage.recompute for stage in strategy.stages} == {"full"}
    assert strategy.precision.compute == "float32"
    assert strategy.optimizer.name == "SGD"
    assert strategy.optimizer.learning_rate == 0.01
    assert strategy.grad_clip_norm == 1.5
    assert provenance.pinned == {"pp": 2, "schedule": "1F1B", "recompute": "full"}
    assert provenance.seed == 3
    assert provenance.partitioner == "expert"
    assert provenance.objective == "memory"
    assert provenance.memory_fraction == 0.5
    assert provenance.evaluation_budget == 20


def test_plan_explains_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(capsys, "plan", *SMALL, "--global-batch", "64", "--explain")
    assert "\nbound by: " in answer.out
    assert "\nrunners-up (" in answer.out


def test_predict_prices_a_strategy_by_hand(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "mesh: {pp: 2, dp_shard: 4}\nzero_stage: 2\nschedule: 1F1B\n"
        "microbatch_size: 2\nnum_microbatches: 8\n"
    )
    out = tmp_path / "plan.json"
    answer = ask(capsys, "predict", "--strategy", path, *SMALL, "--json", "-o", out)
    plan = Plan.from_data(answer.json)
    assert plan.strategy.mesh.pp == 2
    assert plan.provenance.partitioner == "given"
    assert len(plan.prediction.memory) == 2
    assert Plan.load(out).canonical_bytes() == plan.canonical_bytes()
    table = ask(capsys, "predict", "--strategy", path, *SMALL).out
    assert "memory by pp rank:\n  rank " in table
    assert " optimizer " in table


def test_predict_takes_a_plan_and_prices_it_alike(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    local_plan(2, dp_shard=2).save(path)
    words = (*MODEL, "--cluster", "local:2", "--json")
    priced = ask(capsys, "predict", "--strategy", path, *words).json
    planned = local_plan(2, dp_shard=2).prediction
    assert priced["prediction"]["step_time_s"] == pytest.approx(planned.step_time_s)


def test_predict_exits_2_when_memory_does_not_suffice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"microbatch_size": 100000}')
    answer = ask(capsys, "predict", "--strategy", path, *SMALL)
    assert answer.code == 2
    assert "memory by pp rank:" in answer.out
    assert re.match(
        r"meshwright: no feasible plan: pp rank 0 \(a100-80\) needs [\d.]+ GB, "
        r"[\d.]+ GB more than its limit of [\d.]+ GB\n$",
        answer.err,
    )


# -- Refusals --------------------------------------------------------------------


def _error(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    return ask(capsys, "plan", *words, "--global-batch", "64").error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--model gpt3 --cluster dgx-a100",
            "unknown model 'gpt3'; did you mean 'gpt2'",
        ),
        ("--model gpt2 --cluster dgx-a10", "unknown cluster preset 'dgx-a10'; did you"),
        ("--model gpt2 --cluster dgx-a100:0", "'0' is not a number of at least 1"),
        ("--model gpt2 --cluster no.yaml", "cannot read cluster no.yaml: No such file"),
        ("--model hf:no/config --cluster dgx-a100", "hf:no/config: cannot read config"),
        ("--model no.module:f --cluster dgx-a100", "cannot import 'no.module'"),
        ("--model no.txt --cluster dgx-a100", "no.txt"),
        ("--model json:nothing --cluster dgx-a100", "has no function 'nothing'"),
    ],
)
def test_names_of_nothing(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in _error(capsys, *words.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--pin tp", "--pin 'tp' is not KNOB=VALUE, for example tp=8"),
        ("--pin tp=", "--pin 'tp=' is not KNOB=VALUE"),
        ("--pin tp=2 --pin tp=4", "--pin tp is given twice"),
        ("--pin tq=2", "unknown knob to pin 'tq'; did you mean 'tp'?"),
        ("--pin tp=two", "pin tp='two' is not a whole number"),
        ("--pin tp=0", "pin tp=0 is below 1"),
        ("--pin schedule=1f1b", "unknown schedule '1f1b'; "),
        (
            "--partitioner expart",
            "unknown partitioner 'expart'; did you mean 'expert'?",
        ),
        ("--memory-fraction 0", "memory_fraction=0.0 is not a share"),
        ("--learning-rate 0", "--learning-rate 0.0 is not a number above 0"),
        ("--grad-clip-norm -1", "--grad-clip-norm -1.0 is not a number above 0"),
        ("--weight-decay -1", "--weight-decay -1.0 is below 0"),
        ("--betas 0.9 1", "--betas 0.9 1.0 are not numbers from 0 to below 1"),
        ("--optimizer SGD --betas 0.9 0.99", "--optimizer SGD, which takes none"),
        ("--allow-remote-code --model gpt2", "only a hf:PATH brings code of its own"),
    ],
)
def test_wrong_values(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in _error(capsys, *SMALL, *words.split())


def test_a_batch_that_no_mesh_divides_is_infeasible(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (*SMALL, "--pin", "dp_shard=8", "--global-batch", "63")
    answer = ask(capsys, "plan", *words)
    assert answer.code == 2
    assert "must divide global_batch=63" in answer.error
    assert "would fit: " in answer.error
    answer = ask(capsys, "plan", *SMALL, "--global-batch", "0")
    assert answer.code == 1
    assert "global_batch=0 is below 1" in answer.error


def test_too_little_memory_is_infeasible_and_says_by_how_much(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = ask(capsys, "clusters", "dgx-a100", "--json").json
    document["device_types"][0]["memory_bytes"] = 2e7
    path = tmp_path / "small.json"
    path.write_text(json.dumps(document))
    answer = ask(capsys, "plan", *MODEL, "--cluster", path, "--global-batch", "64")
    assert answer.code == 2
    assert re.search(r"\(\d+ bytes\) more than", answer.error)


def test_a_cluster_file_with_a_missing_link(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = ask(capsys, "clusters", "rtx4090-pc:3", "--json").json
    path = tmp_path / "hole.json"
    path.write_text(json.dumps({**document, "levels": []}))
    words = (*MODEL, "--cluster", path)
    assert "3 hosts but no levels: add the link between hosts" in _error(capsys, *words)

    rows = [[1e9] * 3, [1e9] * 3, [1e9, None, 1e9]]
    both = {"bandwidth_bytes_per_s": rows, "latency_s": [[1e-3] * 3] * 3}
    document |= {"levels": [], "topology": "matrix", "matrices": both}
    path.write_text(json.dumps(document))
    assert "missing link from device 2 to device 1" in _error(capsys, *words)


def test_a_model_that_cannot_be_read_names_op_and_module(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "broken_model_of_a_test.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Inner(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x @ torch.ones(3, 3)\n"
        "class Outer(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner = Inner()\n"
        "        self.weight = nn.Parameter(torch.ones(4))\n"
        "    def forward(self, x):\n"
        "        return self.inner(x * self.weight)\n"
        "def build():\n"
        "    return Outer(), {'x': torch.ones(2, 4)}\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ("--model", "broken_model_of_a_test:build", "--cluster", "dgx-a100")
    error = _error(capsys, *words)
    assert "inner" in error
    assert "mm" in error or "matmul" in error


def test_code_that_came_with_a_config_runs_only_when_allowed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, ran = tmp_path / "remote", tmp_path / "ran"
    folder.mkdir()
    config = json.loads((TINY / "config.json").read_text())
    config["model_type"] = "their-own"
    config["auto_map"] = {"AutoConfig": "theirs.TheirConfig"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "theirs.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig\n"
        f"Path({str(ran)!r}).touch()\n"
        "class TheirConfig(LlamaConfig):\n"
        "    pass\n"
    )
    words = ("--model", f"hf:{folder}", "--cluster", "dgx-a100", "--seq-len", "32")
    error = _error(capsys, *words)
    assert "would run code that came with the model" in error
    assert "give --allow-remote-code" in error
    assert not ran.exists()
    allowed = ("--allow-remote-code", "--global-batch", "64", "--json")
    answer = meshwright("plan", *words, *allowed, cwd=tmp_path)
    assert answer.code == 0, answer.err
    assert ran.exists()
    assert answer.json["model"]["ref"] == f"hf:{folder}"


def test_a_place_that_cannot_be_written_is_known_before_planning(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("planner.api.plan", lambda *_, **__: pytest.fail("planned"))
    out = ("-o", tmp_path / "no" / "plan.json")
    assert "is not a folder; create it first" in _error(capsys, *SMALL, *out)
    assert "it is a folder; name a file" in _error(capsys, *SMALL, "-o", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a whole JSON"),
        ("[]", "a strategy is an object with fields"),
        ('{"mesh": {"tp": "x"}}', "field mesh.tp: must be a whole number"),
        ('{"tp": 2}', "field tp: is not known"),
        ('{"mesh": {"dp_shard": 64}}', "64"),
        ('{"mesh": {"tp": 3}, "num_microbatches": 8}', "tp=3"),
    ],
)
def test_wrong_strategies(
    text: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "s.json"
    path.write_text(text)
    answer = ask(capsys, "predict", "--strategy", path, *SMALL)
    assert answer.code == 1
    assert said in answer.error
    missing = ask(capsys, "predict", "--strategy", tmp_path / "none.json", *SMALL)
    assert "cannot read strategy" in missing.error


def test_a_strategy_for_another_batch(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"mesh": {"dp_shard": 8}, "microbatch_size": 2}')
    words = ("--strategy", path, *SMALL, "--global-batch", "64")
    assert "global_batch" in ask(capsys, "predict", *words).error


def test_fused_kernels_are_named_and_their_absence_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("--global-batch", "64", "--partitioner", "expert", "--kernels")
    answer = ask(capsys, "plan", *SMALL, *words, "fused")
    assert answer.code == 0
    assert answer.err.startswith("--kernels fused has no effect: no code was recog")
    assert "fused ones assumed: none was recognised" in answer.out
    config = {
        "model_type": "mamba",
        "architectures": ["MambaForCausalLM"],
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "vocab_size": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    mamba = ("--model", f"hf:{tmp_path}", "--seq-len", "64", *SMALL[-2:])
    answer = ask(capsys, "plan", *mamba, *words, "fused", "--explain")
    assert "the selective scan kernel instead of a selective scan" in answer.out
    assert "mamba-ssm" in answer.out
    assert "with the model's own code the same plan takes" in answer.out
    assert "fallback code" not in answer.err
    assert "fallback code" in ask(capsys, "plan", *mamba, *words, "as-is").err
