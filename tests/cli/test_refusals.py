"""What each command refuses: in one paragraph that says what to write, with status 2, and nothing is left."""

from pathlib import Path

import pytest

from harness.sweep.launchers import submitit_jobs
from tests.support.commands import Call
from tests.support.places import LLAMA
from tests.support.reported import write_hand_made

REFUSED: dict[str, tuple[str, ...]] = {
    # a command or an option that is misspelt
    "runn smoke": ("Did you mean 'run'?", "--help`"),
    "run smoke --snapshots": ("--snapshot", "--help`"),
    "run smoke --jsonn": ("--json", "--help`"),
    "run": ("Missing argument 'recipe'", "--help`"),
    "recipes sho smoke": ("Did you mean 'show'?", "--help`"),
    "run smoke --out": ("--out", "--help`"),
    # a value that cannot be: what fields take, tests/recipe says
    "run smoek": ("smoek", "Did you mean smoke"),
    "run smoke steps=many": ("steps: many", "whole number"),
    "run smoke quantization=nf4": ("quantization", "adapter"),
    "run smoke --device tpu": ("--device tpu", "cpu"),
    "run smoke --device cuda:99": ("--device cuda:99", "cpu"),
    "run smoke model=no-such-model": ("model: no-such-model",),
    "run smoke model=./absent.json": ("absent.json",),
    "run smoke data=absent.txt": ("absent.txt",),
    "run smoke attention=flash_attention_2 precision=bf16 --device cpu": ("attention", "GPU"),
    # an option that is a field
    "run smoke --seq-len 512": ("Write seq_len=VALUE, without dashes",),
    "napkin smoke --hardware h100": ("Write hardware=VALUE, without dashes",),
    "fit smoke --gpu h100": ("Write hardware=VALUE, without dashes",),
    # a word in the wrong place
    "run smoke hardware=h100": ("`harness simulate`",),
    "hardware smoke --price l4=1 h100=2.5": ("--price h100=2.5",),
    "hardware --json": ("Give its name",),
    "hardware --gpus 2": ("Give its name",),
    "hardware --best": ("Give its name",),
    "hardware llama-3.2-1b-bf16 --best --gpus 2": ("Give one",),
    "hardware llama-3.2-1b-bf16 --gpus 1,x": ("as in 1,2,4,8",),
    "fit llama-3.2-1b-bf16 --gpus 0": ("as in 1,2,4,8",),
    "fit llama-3.1-8b-qlora --gpus 2 --quick": ("unless the recipe says parallel=ddp",),
    "shard llama-3.2-1b-bf16 --gpus 0": ("at least 1",),
    "validate --tolerance -1 smoke": ("at least 0",),
    "fit tinyllama-lora --quick --exact": ("--quick",),
    "fit tinyllama-lora --margin 1": ("--margin",),
    "fit tinyllama-lora --memory lots": ("--memory lots",),
    "hardware tinyllama-lora --price h200": ("--price h200",),
    "hardware tinyllama-lora --tokens 50k,x": ("--tokens",),
    "hardware tinyllama-lora --tokens 0": ("--tokens",),
    "hardware --tokens 35M": ("--tokens",),
    "shard llama-3.2-3b-offload-optimizer --gpus 2": ("offload",),
    # simulate and validate
    "simulate tiny.yaml hardware=a10": ("there is no a10 in the table",),
    "simulate tiny.yaml hardware=l4 hardware=t4": ("hardware is given twice",),
    "simulate tiny.yaml compile=true": ("compile: true cannot be simulated",),
    "simulate tiny.yaml --allocator expandable:True": ("--allocator: unknown allocator option",),
    "simulate tiny.yaml hardware=t4": ("t4 has no bf16 units",),
    "simulate tiny.yaml --phases train,evla": ("there is no phase evla. Did you mean eval?",),
    "simulate tiny.yaml --phases eval": ("Write train,eval.",),
    "simulate tiny.yaml --eval-batches 3": ("--eval-batches belongs to an evaluation",),
    "simulate tiny.yaml --phases train,eval --eval-batches 0": ("at least 1 and at most",),
    "simulate nothing": ("there is no recipe and no model 'nothing'",),
    "validate hardware=l4": ("nothing to validate",),
    "validate no.json": ("cannot read the profile no.json",),
    "validate no.json seq_len=4": ("seq_len=4 cannot change the recipe of a profile",),
    "validate tiny.yaml --tolerance -1": ("--tolerance",),
    "validate tiny.yaml adapter=lora lora_targets=nope": (
        "there is no answer to compare. Note: there is no",
    ),
    "validate tiny.yaml compile=true": ("only a napkin profile, and nothing to hold it against. Note: ",),
    **{f"{command} tiny.yaml --memory lots": ("lots",) for command in ("napkin", "simulate", "shard")},
    "fit tiny.yaml --exact --field steps": ("--field steps",),
    # snapshots, reports, differences
    "snapshot show no.pickle": ("there is no no.pickle",),
    "snapshot show tiny.yaml": ("neither a pickle",),
    "report nothing": ("there is no nothing. Give a run folder",),
    "report empty": ("it has neither a profile.json nor a snapshot.pickle",),
    "report a-sweep": ("Its report is a-sweep/report.html",),
    "report text.json": ("text.json is not JSON",),
    "report text.pickle": ("neither a pickle of protocol 2 or later nor a JSON object",),
    "report list.json": ("schema_version",),
    "report recorded --markdown --csv": ("--markdown and --csv exclude each other",),
    "report recorded --png a --out b": ("leave --out away",),
    "report recorded --out no/such/folder.html": ("cannot write no/such/folder.html",),
    "report": ("Missing argument",),
    "diff list.json": ("there are 1 arguments",),
    "diff one.json two.json": ("cannot read the profile one.json",),
    "diff tiny.yaml --python python": ("--python is given 1 times",),
    "diff tiny.yaml --python /nowhere/python --python python": ("No such file",),
    "diff tiny.yaml --python /bin/false --python python": ("does not run there: nothing",),
    "diff a.json b.json --memory 16GiB": ("--memory belongs to a recipe",),
    # sweeps: what fields take, tests/recipe says
    "sweep tiny.yaml micro_batch=1,2": ("there is no field micro_batch. Did you mean micro_batch_size?",),
    "sweep tiny.yaml micro_batch_size=1,many": ("many is not possible",),
    "sweep tiny.yaml hardware=h100,h1000": ("there is no h1000 in the table",),
    "sweep tiny.yaml micro_batch_size=4": ("nothing is swept",),
    "sweep tiny.yaml": ("nothing is swept",),
    "sweep tiny.yaml micro_batch_size": ("is not key=v1,v2",),
    "sweep tiny.yaml micro_batch_size=": ("is not key=v1,v2",),
    "sweep tiny.yaml micro_batch_size=1,,2": ("is not key=v1,v2",),
    "sweep tiny.yaml seed=1,2 seed=3": ("seed is given twice",),
    "sweep tiny.yaml seed=[1,2": ("cannot be read as YAML",),
    "sweep tiny.yaml offload=none,activatoins+optimizer": ("Did you mean activations?",),
    "sweep tiny.yaml micro_batch_size=1,2 --measure hardware=h100": ("hardware= is for predictions",),
    "sweep tiny.yaml micro_batch_size=1,2 --measure --jobs 2": ("disturb each other",),
    "sweep tiny.yaml micro_batch_size=1,2 --measure --napkin": ("--measure and --napkin exclude",),
    "sweep tiny.yaml micro_batch_size=1,2 --json --csv": ("--json and --csv exclude each other",),
    "sweep tiny.yaml micro_batch_size=1,2 --device cpu": ("--device is for --measure",),
    "sweep tiny.yaml seed=1,2 use_dora=true": ("the base recipe is impossible",),
    "sweep tiny.yaml seed=1,2 --launcher submitt": ("no such launcher. Did you mean submitit?",),
    "sweep tiny.yaml seed=1,2 --launcher submitit": ("this machine has no SLURM",),
    "sweep tiny.yaml seed=1,2 --launcher submitit --napkin": ("napkin takes milliseconds",),
    "sweep tiny.yaml seed=1,2 --launcher ray --measure --device cuda:1": ("Give --device cuda or cpu",),
    "sweep tiny.yaml seed=1,2 --launcher-option a=1": ("--launcher-option is for --launcher",),
    "sweep tiny.yaml seed=1,2 --launcher submitit --launcher-option a": ("write KEY=VALUE",),
    "sweep tiny.yaml seed=1,2 --launcher submitit --launcher-option cluster=moon": (
        "there are slurm and local",
    ),
    # servers
    "serve no-such-folder": ("no-such-folder",),
    "serve . --port 99999": ("--port",),
    "serve . --port -1": ("--port",),
    "mcp nothing": ("is no folder. Give folders of runs",),
}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """What the commands name, in the folder where they run."""
    (tmp_path / "tiny.yaml").write_text(f"# Tiny\nmodel: {LLAMA}\nprecision: bf16\nseq_len: 64\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a-sweep").mkdir()
    (tmp_path / "a-sweep/sweep.json").write_text("{}")
    (tmp_path / "text.json").write_text("{nonsense")
    (tmp_path / "text.pickle").write_text("nonsense")
    (tmp_path / "list.json").write_text('{"a": 1}')
    write_hand_made(tmp_path / "recorded")
    return sorted(tmp_path.rglob("*"))


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_one_paragraph_and_leaves_nothing(
    call: Call, tmp_path: Path, files: list[Path], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words.startswith("mcp"):
        pytest.importorskip("mcp", reason="`harness mcp` needs the extra finetune-harness[mcp]")
    monkeypatch.setattr(submitit_jobs.shutil, "which", lambda name: None)
    status, out, err = call(*words.split())
    assert (status, out) == (2, "")
    assert err.startswith("harness: ")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert all(said in err for said in REFUSED[words]), err
    assert sorted(tmp_path.rglob("*")) == files
