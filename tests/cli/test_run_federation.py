"""``meshwright run`` by a federation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner import Cluster, federate
from planner.schema import Precision
from tests.cli.runs import TOKENS
from tests.cli.shell import ask
from tests.plans import tiny_graph

PERIOD = 2


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of two processes and one."""
    made = federate(
        tiny_graph(),
        Cluster.detect(processes=3),
        global_batch=6,
        members=[[0, 1], [2]],
        exchange=f"local_steps:period={PERIOD}",
        partitioner="expert",
        precision=Precision(compute="float32"),
    )
    path = tmp_path_factory.mktemp("federation") / "federation.json"
    made.save(path)
    return path


def test_members_train_and_exchange(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    answer = ask(capsys, "run", file, "--steps", "4", "--json")
    assert answer.code == 0, answer.err
    members = answer.json["members"]
    assert [one["name"] for one in members] == ["member0", "member1"]
    weights = 4 * sum(p.numel for p in tiny_graph().parameters)
    for one in members:
        assert len(one["losses"]) == 4
        assert one["first_step"] == 0
        assert one["exchange_time_s"] > 0
    # Alone in its member a device sends all weights once to one of two.
    assert members[1]["sent_bytes"] == weights
    assert 0 < members[0]["sent_bytes"] < weights


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--measure",), "--measure with the federation"),
        (("--signal", "USR1"), "leaves the others waiting at the exchange"),
        (("--warm-up-steps", "2000"), "warm_up_steps=2000"),
        (("--profile", "3:2"), "3:2"),
        (
            ("--checkpoint-dir", "x", "--steps", "3"),
            "--steps=3 with checkpoints, but members are equal every 2 steps alone",
        ),
        (("--evaluate-every", "2"), "give a number of at least 1, and --eval-data"),
        (("--resume",), "--resume needs a folder"),
        (("--save-dtype", "float16"), "--save-dtype float16 without --save-hf"),
        (("--on", "ray"), "start each process where it belongs"),
        (("--steps", "0"), "--steps 0; a run has at least 1 step"),
        (("--max-restarts", "1"), "the run stops when a member fails"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(
    capsys: pytest.CaptureFixture[str], file: Path, words: tuple[str, ...], said: str
) -> None:
    answer = ask(capsys, "run", file, *words)
    assert answer.code == 1
    assert said in answer.error


def test_weights_checkpoints_and_evaluations_are_kept(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path
) -> None:
    """A run saves, evaluates, and is resumed; the weights are a model's."""
    from transformers import AutoModelForCausalLM

    words = ("run", file, "--checkpoint-dir", tmp_path / "kept", "--eval-data", TOKENS)
    first = ask(capsys, *words, "--steps", "2", "--json")
    assert first.code == 0, first.err
    ((step, loss),) = first.json["evaluations"]
    assert step == 2
    saved = tmp_path / "saved"
    words = (*words, "--resume", "--save-hf", saved)
    again = ask(capsys, *words, "--steps", "4", "--json")
    assert again.code == 0, again.err
    assert [one["first_step"] for one in again.json["members"]] == [2, 2]
    assert [len(one["losses"]) for one in again.json["members"]] == [2, 2]
    ((step, later),) = again.json["evaluations"]
    assert step == 4
    assert later != loss
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel for p in tiny_graph().parameters
    )


@pytest.mark.further
def test_options_of_the_loop_are_those_of_each_member(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path
) -> None:
    words = ("--lr-schedule", "linear", "--warm-up-steps", "2", "--steps", "4")
    words = (*words, "--log", tmp_path / "log.jsonl", "--check-replicas-every", "1")
    words = (*words, "--profile", "2:2", "--profile-dir", tmp_path / "traces")
    words = (*words, "--data", TOKENS)
    answer = ask(capsys, "run", file, *words, "--on-nonfinite", "skip", "--json")
    assert answer.code == 0, answer.err
    for name, found in zip(("member0", "member1"), answer.json["members"], strict=True):
        text = (tmp_path / f"log-{name}.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        steps = [line for line in lines if line["event"] == "step"]
        assert [line["loss"] for line in steps] == found["losses"]
        rates = [line["learning_rate"] for line in steps]
        assert rates == pytest.approx([rates[1] / 2, rates[1], rates[1], 0.0])
        assert lines[-1]["event"] == "end"
    traces = sorted(path.name for path in (tmp_path / "traces").rglob("*.json"))
    assert traces == ["rank-0-steps-2-2.json"] * 2 + ["rank-1-steps-2-2.json"]


def test_a_federation_for_another_machine_is_refused(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    text = file.read_text(encoding="utf-8")
    fingerprint = Cluster.detect(processes=3).fingerprint
    other.write_text(text.replace(fingerprint, "0" * 16), encoding="utf-8")
    answer = ask(capsys, "run", other, "--steps", "2")
    assert answer.code == 1
    assert "not for this machine" in answer.error


def test_a_file_edited_by_hand_is_refused(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    text = file.read_text(encoding="utf-8")
    other.write_text(text.replace('"global_batch": 6', '"global_batch": 8'))
    answer = ask(capsys, "run", other)
    assert answer.code == 1
    assert "members train 6 samples a step, global_batch says 8" in answer.error
