"""``meshwright convert`` and the weights of ``meshwright run``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.cli.shell import ask


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights and configuration of a Llama, in the current folder."""
    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    model.save_pretrained("llama")
    (tmp_path / "llama" / "tokenizer_config.json").write_text("{}")
    return tmp_path / "llama"


def test_a_run_begins_with_weights_and_a_checkpoint_becomes_some(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", "hf:llama", "--seq-len", "8", "--cluster", "local:2")
    pins = ("--global-batch", "4", "--pin", "dp_shard=2", "-o", "plan.json")
    assert ask(capsys, "plan", *words, *pins).code == 0
    given = ("--init-from", "llama", "--checkpoint-dir", "kept", "--save-hf", "saved")
    answer = ask(capsys, "run", "plan.json", "--force", "--steps", "1", *given)
    assert answer.code == 0, answer.err
    answer = ask(
        capsys, "convert", "kept", "--model", "hf:llama", "--save-hf", "converted"
    )
    assert answer.code == 0, answer.err
    assert (tmp_path / "saved" / "tokenizer_config.json").read_text() == "{}"
    saved, converted = (
        AutoModelForCausalLM.from_pretrained(name).state_dict()
        for name in ("saved", "converted")
    )
    assert saved.keys() == converted.keys()
    assert all(torch.equal(saved[name], converted[name]) for name in saved)
    # One step from 3, not from the 1 that a new model begins with.
    assert 2.9 < float(saved["model.norm.weight"].mean()) < 3.1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--init-from", "nowhere"), "nowhere does not exist"),
        (("--save-hf", "llama"), "--save-hf llama exists; name a new folder"),
        (("--allow-missing-weights",), "without --init-from"),
        (("--save-dtype", "bfloat16"), "without --save-hf"),
    ],
)
def test_a_run_refuses_before_it_starts(
    llama: Path,
    plan_file: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: str,
) -> None:
    answer = ask(capsys, "run", plan_file, *words)
    assert answer.code == 1
    assert said in answer.err


def test_a_folder_without_a_checkpoint_is_refused(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = ask(
        capsys, "convert", "llama", "--model", "hf:llama", "--save-hf", "saved"
    )
    assert answer.code == 1
    assert "holds no checkpoint" in answer.err
    assert not Path("saved").exists()
