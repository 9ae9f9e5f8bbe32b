"""write_whole: the old file or the new one, never a part, and nothing left behind."""

import os
import socket
import stat
from pathlib import Path

import pytest

from harness.errors import InputError
from harness.system import files, read_whole, write_whole
from tests.support.places import open_below


def test_writes_bytes_and_text(tmp_path: Path) -> None:
    write_whole(tmp_path / "a.bin", b"\x00\xff")
    write_whole(tmp_path / "a.txt", "naïve ✓\n")
    assert (tmp_path / "a.bin").read_bytes() == b"\x00\xff"
    assert (tmp_path / "a.txt").read_bytes() == "naïve ✓\n".encode()


def test_replaces_and_leaves_only_the_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_whole(path, "old")
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["profile.json"]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_symbolic_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


@pytest.mark.parametrize("stage", ["fsync", "replace"])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failure_keeps_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, failure: BaseException
) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(files.os, stage, fail)
    expected = InputError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_reader_never_sees_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    seen = []
    replace = os.replace

    def replace_and_look(source: str, target: str) -> None:
        seen.append(path.read_text())
        replace(source, target)
        seen.append(path.read_text())

    monkeypatch.setattr(files.os, "replace", replace_and_look)
    write_whole(path, "new" * 100_000)
    assert seen == ["old", "new" * 100_000]


@pytest.mark.parametrize("place", ["missing/a", ".", "fifo", "x" * 300])
def test_a_path_that_cannot_be_written_is_named(tmp_path: Path, place: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InputError, match="cannot write") as caught:
        write_whole(tmp_path / place, "x")
    assert str(tmp_path / place) in str(caught.value)
    assert os.listdir(tmp_path) == ["fifo"]


def test_only_a_regular_file_is_read_and_no_other_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)  # a socket's path has at most 108 bytes
    bound = socket.socket(socket.AF_UNIX)
    bound.bind("socket")
    (tmp_path / "link").symlink_to("fifo")
    for place, reason in {
        "fifo": "it is not a regular file",
        "link": "it is not a regular file",
        "socket": "it is not a regular file",
        "folder": "it is a folder",
        "missing": "No such file or directory",
        "x" * 300: "File name too long",
        "\0": "its name holds a null byte",
    }.items():
        with pytest.raises(OSError, match=reason) as caught:
            read_whole(tmp_path / place, 10)
        assert caught.value.strerror == reason
    for device in ("/dev/zero", "/dev/tty"):
        with pytest.raises(OSError, match="it is not a regular file"):
            read_whole(device, 10)
    bound.close()


def test_a_file_that_becomes_a_pipe_at_the_last_moment_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    opened = os.open

    def swapped(name: str, *rest: int) -> int:
        os.remove(name)
        os.mkfifo(name)
        return opened(name, *rest)

    monkeypatch.setattr(files.os, "open", swapped)
    with pytest.raises(OSError, match="not a regular file"):
        read_whole(path, 10)


def test_no_more_is_read_than_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    assert read_whole(path, 10) == b"0123456789"
    with pytest.raises(OSError, match="has 10 bytes, and at most 9 are"):
        read_whole(path, 9)
    with open(path, "wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    with pytest.raises(OSError, match="has 1,099,511,627,776 bytes"):
        read_whole(path, 1000)
    monkeypatch.setattr(files, "_refuse_irregular", lambda *_: None)
    with pytest.raises(OSError, match="at most 1,000 are read"):
        read_whole("/dev/zero", 1000)  # says that it has none, as a file in /proc does


def test_content_and_name_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes before the name is taken, the name after: a power cut leaves one or the other file whole."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        status = os.fstat(descriptor)
        done.append("folder" if stat.S_ISDIR(status.st_mode) else f"{status.st_size} bytes")
        fsync(descriptor)

    def replaced(source: str, target: str) -> None:
        done.append("named")
        replace(source, target)

    monkeypatch.setattr(files.os, "fsync", synced)
    monkeypatch.setattr(files.os, "replace", replaced)
    write_whole(tmp_path / "a", "12345")
    assert done == ["5 bytes", "named", "folder"]
    assert open_below(tmp_path) == []
