"""``meshwright run`` and ``probe`` refuse bad requests before they start a process."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.cli.runs import TOKENS, changed
from tests.cli.shell import ask
from tests.plans import gpt2_plan, local_plan


@pytest.mark.usefixtures("no_processes")
class TestRefusedBeforeTheStart:
    def test_a_plan_for_other_devices(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        path = tmp_path / "p.json"
        gpt2_plan().save(path)
        answer = ask(capsys, "run", path)
        assert answer.code == 1
        assert answer.error.startswith(
            "the plan is for dgx-a100, not for this machine: devices 8 x a100-80 in "
            "the plan, 8 x cpu here; plan for local"
        )

    def test_a_plan_that_wants_to_import_code(
        self, capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path
    ) -> None:
        changed(plan_file, model={"ref": "os:getcwd"})
        error = ask(capsys, "run", plan_file).error
        assert "would import code (os:getcwd)" in error
        assert "--model os:getcwd" in error

    def test_a_plan_that_does_not_know_its_model(
        self, capsys: pytest.CaptureFixture[str], plan_file: Path
    ) -> None:
        changed(plan_file, model={"ref": None})
        assert "name it with --model" in ask(capsys, "run", plan_file).error

    def test_a_plan_of_a_profile(
        self, capsys: pytest.CaptureFixture[str], plan_file: Path
    ) -> None:
        changed(plan_file, model={"ref": "vgg/graph.txt"})
        error = ask(capsys, "run", plan_file).error
        assert "made from the profile vgg/graph.txt" in error

    def test_remote_code_of_no_named_model(
        self, capsys: pytest.CaptureFixture[str], plan_file: Path
    ) -> None:
        error = ask(capsys, "run", plan_file, "--allow-remote-code").error
        assert "--allow-remote-code without --model" in error

    def test_no_steps(
        self, capsys: pytest.CaptureFixture[str], plan_file: Path
    ) -> None:
        error = ask(capsys, "run", plan_file, "--steps", "0").error
        assert error == "--steps 0; a run has at least 1 step"

    def test_a_plan_that_cannot_be_run(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        plan = local_plan(2, dp_shard=2)
        path = tmp_path / "p.json"
        plan.model_copy(update={"not_runnable": ("cp=2 is not run yet",)}).save(path)
        error = ask(capsys, "run", path).error
        assert error == "this plan cannot be run: cp=2 is not run yet"

    def test_a_first_step_that_is_not_to_be_one_process_s(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        plan = local_plan(2, dp_replicate=2)
        strategy = plan.strategy.model_copy(
            update={"gradient_compression": "bfloat16", "semantics": "approximate"}
        )
        path = tmp_path / "p.json"
        plan.model_copy(update={"strategy": strategy}).save(path)
        error = ask(capsys, "run", path, "--check-first-step").error
        assert error.startswith(
            "check_first_step with gradient_compression=bfloat16; it changes gradients"
        )

    def test_a_measurement_that_cannot_be_written(
        self, capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path
    ) -> None:
        answer = ask(capsys, "run", plan_file, "-o", tmp_path / "no" / "m.json")
        assert "create it first" in answer.error

    @pytest.mark.parametrize(
        ("tokens", "said"),
        [
            (
                np.zeros(100, np.float32),
                "dtype float32; it must be one row of at least 32",
            ),
            (np.zeros((10, 10), np.int64), "has shape (10, 10)"),
            (np.zeros(31, np.int64), "has shape (31,)"),
            (np.zeros(0, np.int64), "has shape (0,)"),
            (np.full(100, 256), "has token 256, the vocabulary is 0 to 255"),
            (np.full(100, -1), "has token -1, the vocabulary is 0 to 255"),
            (np.array([{}] * 100), "not a whole .npy file of numbers"),
        ],
    )
    def test_tokens_of_the_wrong_kind(
        self,
        tokens: np.ndarray,
        said: str,
        capsys: pytest.CaptureFixture[str],
        plan_file: Path,
        tmp_path: Path,
    ) -> None:
        path = tmp_path / "tokens.npy"
        np.save(path, tokens)
        assert said in ask(capsys, "run", plan_file, "--data", path).error

    def test_files_that_are_not_tokens(
        self, capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path
    ) -> None:
        path = tmp_path / "tokens"

        def error() -> str:
            return ask(capsys, "run", plan_file, "--data", path).error

        assert "No such file" in error()
        path.write_bytes(b"")
        assert "cannot read tokens" in error()
        path.write_bytes(TOKENS.read_bytes()[:200])
        assert "cannot read tokens" in error()
        path.write_bytes(pickle.dumps(list(range(100))))
        assert "not a whole .npy file of numbers" in error()
        np.savez(tmp_path / "both.npz", a=np.zeros(100, int))
        (tmp_path / "both.npz").rename(path)
        assert "it is a .npz of several arrays" in error()
        path.unlink()
        path.mkdir()
        assert "Is a directory" in error()

    def test_tokens_for_a_model_that_reads_none(
        self, capsys: pytest.CaptureFixture[str], plan_file: Path
    ) -> None:
        images = {"name": "pixel_values", "shape": [3, 8, 8], "dtype": "float32"}
        changed(plan_file, workload={"inputs": [images]})
        error = ask(capsys, "run", plan_file, "--data", TOKENS).error
        assert "the model reads pixel_values; leave --data out" in error

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--processes", "0"), "--processes 0; probe at least 1"),
            (("--seconds", "0"), "--seconds 0 is not above 0"),
            (("--seconds", "nan"), "--seconds nan is not above 0"),
            (("-o", "no/probe.json"), "no is not a folder"),
        ],
    )
    def test_probes(
        self, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert said in ask(capsys, "probe", *words).error
