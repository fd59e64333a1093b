"""Files are written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from planner.errors import PlanFileError
from planner.schema import Strategy, write_atomically
from planner.schema.base import require_writable


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "ours", b"x")
    (tmp_path / "plain").write_bytes(b"x")
    modes = {stat.S_IMODE((tmp_path / n).stat().st_mode) for n in ("ours", "plain")}
    assert len(modes) == 1


def test_an_old_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "private"
    path.write_bytes(b"old")
    path.chmod(0o600)
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("failing", ["replace", "chmod"])
def test_a_failing_write_leaves_the_old_file_and_nothing_else(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "strategy.json"
    Strategy().save(path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, failing, full)
    with pytest.raises(PlanFileError, match=r"cannot write .*No space left on device"):
        Strategy(microbatch_size=2).save(path)
    assert path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["strategy.json"]


def test_an_interrupted_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "a", b"x")
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """The old content stays readable through a handle opened before."""
    path = tmp_path / "a"
    write_atomically(path, b"old")
    with path.open("rb") as reader:
        write_atomically(path, b"new and longer")
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new and longer"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """Renaming over /dev/null as root would remove the machine's null device."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(path, b"through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_places_that_cannot_be_written_are_known_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path, why in (
        (tmp_path, "it is a folder; name a file in it"),
        (tmp_path / "no" / "plan.json", "no is not a folder; create it first"),
        (tmp_path / "file" / "plan.json", "file is not a folder"),
    ):
        with pytest.raises(PlanFileError, match=why):
            require_writable(path)
        with pytest.raises(PlanFileError, match=why):
            write_atomically(path, b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_read_only_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere: what the system would answer others is put in.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PlanFileError, match="is read-only; choose another path"):
        require_writable(tmp_path / "plan.json")
