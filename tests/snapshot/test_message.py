"""PyTorch's message of an out-of-memory, in the forms it has had, with numbers that people met."""

import io
import sys
from pathlib import Path

import pytest

from harness.errors import InputError
from harness.snapshot.message import message_in_words, read_message
from tests.support.commands import Call

SEMICOLONS = (
    "RuntimeError: CUDA out of memory. Tried to allocate {} (GPU {}; {} total capacity; "
    "{} already allocated; {} free; {} reserved in total by PyTorch) If reserved memory is >> allocated "
    "memory try setting "
    "max_split_size_mb to avoid fragmentation."
)
"""Up to 2.0."""
SENTENCES = (
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU {} has a total {} of {} "
    "of which {} is free. {}Of the allocated memory {} is allocated by PyTorch, and {} is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
"""Since 2.1; "capacity" since 2.3."""
MET = {
    # github.com/pytorch/pytorch/issues/59778: the driver had room
    SEMICOLONS.format("2.26 GiB", 0, "6.00 GiB", "781.59 MiB", "3.03 GiB", "1.24 GiB"): "The device had room",
    # github.com/JDAI-CV/centerX/issues/51: 33.56 MiB, and 184 MiB in pieces
    SEMICOLONS.format("130.00 MiB", 1, "7.80 GiB", "5.91 GiB", "33.56 MiB", "6.09 GiB"): "It was in pieces",
    # github.com/YingqianWang/iPASSR/issues/9: 10.73 asked for, 1.95 GiB in pieces
    SEMICOLONS.format(
        "10.73 GiB", 0, "8.00 GiB", "17.20 GiB", "0 bytes", "19.15 GiB"
    ): "8.78 GiB were missing",
    # github.com/kerrj/lerf/issues/73: 3.00 asked for, 1.66 and 4.84 free
    SENTENCES.format(
        *("3.00 GiB", 0, "capacty", "23.65 GiB", "1.66 GiB"),
        *(
            "Including non-PyTorch memory, this process has 20.81 GiB memory in use. ",
            "12.09 GiB",
            "4.84 GiB",
        ),
    ): "It was in pieces: 6.50 GiB",
    # github.com/Synthintel0/MyGirlGPT/issues/11: 32 MiB asked for, 41.56 MiB free
    SENTENCES.format(
        *("32.00 MiB", 0, "capacty", "4.00 GiB", "41.56 MiB"),
        *("Including non-PyTorch memory, this process has 3.44 GiB memory in use. ", "2.58 GiB", "1.90 MiB"),
    ): "The device had room",
}


@pytest.mark.parametrize("message", MET)
def test_whether_it_was_full_or_in_pieces(message: str) -> None:
    said = " ".join(message_in_words(read_message(message)))
    assert MET[message] in said
    verdicts = ("The device had room", "It was in pieces", "were missing", "too rounded")
    assert sum(verdict in said for verdict in verdicts) == 1


def test_every_number_of_a_message_is_read() -> None:
    middle = (
        "Process 7 has 10.00 GiB memory in use. Including non-PyTorch memory, this process has 60.00 GiB "
        "memory in use. "
    )
    text = SENTENCES.format(
        "9.50 GiB", 3, "capacity", "79.25 GiB", "9.25 GiB", middle, "57.00 GiB", "2.25 GiB"
    )
    text = text.replace(
        "by PyTorch, and", "by PyTorch, with 1.50 GiB allocated in private pools (e.g., CUDA Graphs), and"
    )
    found = read_message(f"step 1\nstep 2\n{SEMICOLONS}\n{text}\nand 8.00 GiB allowed, says the program")
    gib = 2**30
    assert found.requested_bytes == 9.5 * gib
    assert (found.device, found.total_bytes, found.free_bytes) == (3, 79.25 * gib, 9.25 * gib)
    assert (found.allocated_bytes, found.unallocated_bytes) == (57 * gib, 2.25 * gib)
    assert (found.private_bytes, found.limit_bytes) == (1.5 * gib, None)
    assert (found.process_bytes, found.others_bytes) == (60 * gib, 10 * gib)
    said = "\n".join(message_in_words(found))
    assert "Other processes on it held 10.00 GiB" in said
    assert "The process held 0.75 GiB beside it" in said
    for command in ("fit RECIPE --data FILE", "simulate RECIPE --phases train,eval", "watch -- COMMAND"):
        assert f"`harness {command}`" in said  # for whom steps before it went well


def test_a_process_in_a_container_is_not_another_one() -> None:
    """github.com/FoundationVision/GenerateU/issues/10: the driver knows it by a number that it has not."""
    own = "Process 20398 has 14.52 GiB memory in use. "
    text = SENTENCES.format(
        *("496.00 MiB", 0, "capacty", "14.75 GiB", "235.06 MiB", own, "14.06 GiB", "330.42 MiB")
    )
    found = read_message(text)
    assert found.others_bytes == 0
    assert found.process_bytes == int(14.52 * 2**30)


def test_a_limit_of_the_process() -> None:
    """As set_per_process_memory_fraction(0.1) makes PyTorch say."""
    text = SENTENCES.format(
        "9.50 GiB", 0, "capacity", "79.25 GiB", "70.00 GiB", "7.92 GiB allowed; ", "5.00 GiB", "0 bytes"
    )
    assert "allowed 7.92 GiB" in " ".join(message_in_words(read_message(text)))


def test_the_command_reads_a_log_and_stdin(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"step 1\n{next(iter(MET))}\n")

    def said(*words: str, given: str = "", status: int = 0) -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
        ended, out, err = call("snapshot", "show", *words)
        assert ended == status, err
        return out + err

    from_log = said("--message", str(log))
    assert from_log == said("--message", "-", given=log.read_text())
    assert " ".join(from_log.split()).startswith(
        "Memory ran out: 2.26 GiB were asked for, and GPU 0 had 3.03 GiB of 6.00 GiB left."
    )
    assert "there is no out-of-memory of PyTorch in it" in said("--message", "-", given="fine", status=2)
    assert "No such file" in said("--message", "none.log", status=2)
    assert "give a snapshot, or --message" in said(status=2)
    assert "give a snapshot, or --message" in said(str(log), "--message", "-", status=2)
    assert "--device belongs to a snapshot" in said("--message", str(log), "--device", "0", status=2)


@pytest.mark.parametrize(
    "text", ["RuntimeError: CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when"]
)
def test_a_message_of_cuda_itself_has_no_sizes(text: str) -> None:
    with pytest.raises(InputError, match="not of PyTorch's allocator, so it has no sizes"):
        read_message(text)


def test_what_is_no_message() -> None:
    for text in (
        "",
        "out of memory",
        "CUDA out of memory. Tried to allocate a lot",
        "DefaultCPUAllocator: no",
    ):
        with pytest.raises(InputError, match="there is no out-of-memory of PyTorch in it"):
            read_message(text)
