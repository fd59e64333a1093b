"""Plan files, and this process as a rank of torchrun."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.cli import models
from tests.cli.runs import LAUNCHER, two_stages
from tests.plans import local_plan


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    local_plan(2, dp_shard=2).save(path)
    return path


@pytest.fixture
def lone_file(tmp_path: Path) -> Path:
    path = tmp_path / "lone.json"
    local_plan(1, pp=1).save(path)
    return path


@pytest.fixture
def failing_file(tmp_path: Path) -> Path:
    """A plan of two stages for a model whose third layer fails when it is run."""
    path = tmp_path / "fails.json"
    two_stages(models.failing()).save(path)
    return path


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a process is started: what is known before must not start one."""

    def launched(*_: object, **__: object) -> None:
        pytest.fail("processes were started")

    monkeypatch.setattr(LAUNCHER, "launch", launched)


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is all of a torchrun of one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in (
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", str(port)),
        ("GLOO_SOCKET_IFNAME", "lo"),
    ):
        monkeypatch.setenv(name, value)
