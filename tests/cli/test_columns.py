"""What a command prints for people fits the columns of their terminal, and loses no word to it."""

from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from harness.cli.terminal.lines import wrapped
from harness.cli.terminal.terminal import Terminal, print_table, rows_table
from harness.recipe import list_models
from tests.support.commands import Call
from tests.support.long import long
from tests.support.places import LLAMA

TINY = f"model: {LLAMA}\nprecision: bf16\nmicro_batch_size: 2\nseq_len: 64\n"
GPU = "hardware=rtx-4090"
COMMANDS = {
    "napkin": ["napkin", "llama-3.1-8b-qlora", GPU],
    "napkin of experts": ["napkin", "mixtral-qlora", "hardware=h200"],
    "napkin, offloaded": ["napkin", "llama-3.2-3b-offload-parameters", GPU],
    "shard": ["shard", "tiny.yaml", "hardware=h100", "adapter=lora"],
    "shard, refused": ["shard", "tiny.yaml", "adapter=lora", "quantization=nf4", "--gpus", "2", GPU],
    "napkin of a rank": ["napkin", "llama-3.1-8b-full-bf16", "parallel=fsdp", "dp_shard=8"],
    "hardware": ["hardware", "mistral-7b-qlora"],
    "cards": ["hardware", "llama-3.1-8b-full-bf16", "--gpus", "1,2,4,8"],
    "device table": ["hardware"],
    "fit": ["fit", "llama-3.1-8b-full-bf16", GPU, "--quick"],
    "simulate": ["simulate", "tiny.yaml", GPU],
    "simulate, verbose": ["simulate", "tiny.yaml", GPU, "--verbose"],
    "validate": ["validate", "tiny.yaml", GPU],
    "sweep": [
        *("sweep", "llama-3.1-8b-lora", "micro_batch_size=1,2", "gradient_checkpointing=true,false"),
        *("optimizer=adamw,paged_adamw_8bit", "--grid", "--napkin"),
    ],
    "recipes": ["recipes"],
    "models": ["models"],
    "help": ["--help"],
}


def is_a_path(line: str) -> bool:
    """A word wider than any terminal: a path, or a place in a file."""
    return any("/" in word and len(word) > 60 for word in line.split()) or line.startswith("sweep folder:")


@pytest.mark.parametrize("columns", [80, pytest.param(100, marks=long)])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_line_fits(name: str, columns: int, monkeypatch, call: Call, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, err = call(*COMMANDS[name], *(["--out", "sweep"] if name == "sweep" else []))
    assert len(out.splitlines()) > 3, err
    lines = [line.rstrip() for line in (out + err).splitlines()]
    assert [line for line in lines if len(line) > columns and not is_a_path(line)] == []


def test_a_model_has_one_line_of_80_columns(monkeypatch, call: Call) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = call("models")[1].splitlines()
    rows = out[1 : out.index("")]
    assert [row.split()[0] for row in rows] == list_models()
    # as the recipes for cards say: qlora from 16 GB on, LoRA 24, full 48 and 80
    assert next(row for row in rows if row.startswith("llama-3.1-8b ")).split()[-3:] == ["16", "24", "48"]


def test_a_sweep_s_cells_are_folded_between_their_words(monkeypatch, call: Call) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = call(*COMMANDS["sweep"], "--out", "sweep")[1].split()
    for word in ("micro_batch_size=2,", "gradient_checkpointing=false,", "optimizer=paged_adamw_8bit"):
        assert word in shown


@pytest.mark.parametrize("width", [20, 33, 47, 80, 200])
def test_columns_that_do_not_fit_follow_below_with_the_first_again(width: int, capsys) -> None:
    table = Table(box=None)
    for heading in ("place", "napkin", "simulated", "emulated", "measured"):
        table.add_column(heading, no_wrap=True)
    table.add_row("peak", *(f"{n}.00 GiB" for n in range(1, 5)))
    print_table(Terminal(width=width), table)
    lines = capsys.readouterr().out.splitlines()
    words = " ".join(lines).split()
    assert {"napkin", "simulated", "emulated", "measured", "1.00", "2.00", "3.00", "4.00"} <= set(words)
    assert words.count("peak") == words.count("place") == len(lines) / 2
    assert max(map(len, lines)) <= max(width, len("peak  3.00 GiB  "))


def test_a_path_that_is_too_wide_is_broken_and_its_numbers_stay_beside_it(capsys) -> None:
    path = "base_model.model.model.layers.*.mlp.experts.parametrizations.gate_up_proj"
    rows = [["parameters", path, "9.00 GiB", "48"]]
    table = rows_table(["what", "where", "bytes", "count"], rows, wraps=(1,))
    print_table(Terminal(width=80), table)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if "parameters" in line)
    assert row.split()[-3:] == ["9.00", "GiB", "48"]
    broken = "".join(line[14:60].strip() for line in lines[lines.index(row) :])
    assert broken == path


def test_a_path_or_a_list_is_broken_between_its_parts(capsys) -> None:
    cells = "precision=bf16,adapter=lora,gradient_checkpointing=true,micro_batch_size=4"
    print_table(
        Terminal(width=80), rows_table(["cells", "peak", "n"], [[cells, "14.35 GiB", "15"]], wraps=(0,))
    )
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "=" in line]
    assert lines == ["precision=bf16,adapter=lora,gradient_checkpointing=true,", "micro_batch_size=4"]


def test_a_line_is_broken_at_spaces_alone() -> None:
    line = "  note: " + "word " * 30 + "/a/path/" + "x" * 90
    parts = wrapped(line, 40)
    assert " ".join(part.strip() for part in parts) == " ".join(line.split())
    assert all(len(part) <= 40 for part in parts[:-1])
    assert parts[1].startswith("    word")
    assert wrapped(line, None) == [line]


def test_what_is_piped_is_not_broken(monkeypatch, capsys) -> None:
    from harness.cli.terminal.terminal import say

    monkeypatch.delenv("COLUMNS", raising=False)
    say(Console(), "word " * 60)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_models_are_all_listed_with_their_sizes(call: Call) -> None:
    assert len(call("models")[1].splitlines()[0]) <= 80  # a heading that is broken is none
    rows = {line.split()[0]: line.split()[1:] for line in call("models")[1].splitlines() if line}
    assert set(list_models()) <= set(rows)
    # as their model cards say: 1.24 B with the head tied, 8.03 B, 46.7 B
    assert rows["llama-3.2-1b"][0] == "1,235.8"
    assert rows["llama-3.1-8b"][0] == "8,030.3"
    assert rows["mixtral-8x7b"][0] == "46,702.8"


def test_version_and_completion(monkeypatch, call: Call) -> None:
    from importlib.metadata import version

    assert call("--version") == (0, f"harness {version('finetune-harness')}\n", "")
    monkeypatch.setenv("_HARNESS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "harness sim")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert call()[1].split() == ["simulate"]
    monkeypatch.setenv("COMP_WORDS", "harness fit gpt-oss-20b")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert call()[1].split() == ["gpt-oss-20b-qlora-24gb", "gpt-oss-20b"]
