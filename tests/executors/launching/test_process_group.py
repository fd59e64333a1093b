"""Variables that NCCL finds when a group is made."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from executors.launching.process_group import process_group

WANTED = {"NCCL_ALGO": "allreduce:ring"}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Record what the variable says each time that a group would be made."""
    seen: list[str | None] = []
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda *_, **__: seen.append(os.environ.get("NCCL_ALGO")),
    )
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    return seen


def _made(kind: str) -> str | None:
    with process_group(torch.device(kind), alone=True, variables=WANTED):
        return os.environ.get("NCCL_ALGO")


def test_they_are_set_before_the_group_and_go_with_it(found: list[str | None]) -> None:
    assert _made("cuda") == "allreduce:ring"
    assert found == ["allreduce:ring"]
    assert "NCCL_ALGO" not in os.environ


def test_those_that_are_set_stay(
    found: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert _made("cuda") == "Tree"
    assert found == ["Tree"]
    assert os.environ["NCCL_ALGO"] == "Tree"


def test_gloo_is_told_nothing(found: list[str | None]) -> None:
    assert _made("cpu") is None
    assert found == [None]
