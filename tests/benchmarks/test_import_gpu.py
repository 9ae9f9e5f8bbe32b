"""Bringing the hardware programme's results into the repository, and the document made from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import predict
from benchmarks.gpu_programme.import_results import main
from benchmarks.gpu_programme.trace_file import load_trace
from harness.hardware import Calibration, find_hardware, hardware
from harness.step_profile.step_profile import StepProfile
from pages.profiles import __main__ as profiles_readme
from tests.support.gpu_results import (
    DEVICE,
    GIB,
    PROVENANCE,
    RECIPE,
    document,
    encoded,
    ok,
    out_of_memory,
    profile,
    trace_of,
)
from tests.support.places import ROOT

ENTRY = {
    "action": "alloc",
    "addr": 512,
    "size": 5,
    "stream": 0,
    "frames": [{"filename": "/home/me/v/lib/python3.12/site-packages/torch/a.py", "line": 3, "name": "f"}],
}
MEASUREMENTS = (
    ok("host-link", rows=[{"memory": "pinned", "bytes": 31.5077e9, "s": 1.0}]),  # half of 63.015e9
    ok("launch", operator_s=7e-6, context_bytes=600 * 2**20),
    {"name": "cublas", "status": "error", "reason": "x", "traceback": "File /home/me/copy/harness/model.py"},
)


@pytest.fixture
def brought(tmp_path):
    """Write documents as the programme would and import them; returns exit status and the two folders."""

    def bring(*documents: dict[str, Any], arguments: tuple[str, ...] = ()) -> tuple[int, Path, Path]:
        results, profiles, traces = (tmp_path / name for name in ("results", "profiles", "traces"))
        results.mkdir(exist_ok=True)
        for each in documents:
            (results / f"{each['part']}.json").write_text(json.dumps(each))
        folders = ["--profiles", str(profiles), "--traces", str(traces)]
        return main([str(results), *folders, *arguments]), profiles, traces

    return bring


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def everything() -> list[dict[str, Any]]:
    top = [{"size_bytes": 1, "category": "other", "stack": ["/home/me/copy/harness/training/step.py:3 f"]}]
    measured = profile("measured", 20.0) | {
        "top": top,
        "recipe": RECIPE | {"data": "/home/me/recipes/data/g.txt"},
    }
    trace = trace_of(
        [ENTRY], [], recipe_fields=RECIPE | {"data": "/home/me/copy/recipes/data/g.txt"}, name="1b-bf16"
    )
    profiles = {"napkin": profile("napkin", 21.0), "simulated": profile("simulated", 20.1)}
    return [
        document("traces", ok("1b-bf16", trace=encoded(trace), events=1)),
        document("validate", ok("llama-3.1-8b-lora", profile=measured)),
        document("predict", ok("llama-3.1-8b-lora", profiles=profiles, reasons={})),
        document("calibrate", *MEASUREMENTS),
    ]


def test_each_result_goes_to_its_place(brought):
    status, profiles, traces = brought(*everything())
    assert status == 0
    assert sorted(files_below(profiles)) == [
        *("h200/calibration.json", "h200/llama-3.1-8b-lora.measured.json"),
        *("h200/llama-3.1-8b-lora.napkin.json", "h200/llama-3.1-8b-lora.simulated.json"),
        *("h200/programme/calibrate.json", "h200/programme/predict.json"),
        *("h200/programme/traces.json", "h200/programme/validate.json"),
    ]
    assert sorted(files_below(traces)) == ["1b-bf16.json.gz"]
    assert (
        "profile"
        not in json.loads((profiles / "h200/programme/validate.json").read_bytes())["results"][0]["result"]
    )


def test_nothing_of_the_machine_stays(brought):
    _, profiles, traces = brought(*everything())
    contents = b"".join(files_below(profiles).values())
    for word in (b"/home", b"someones", b"/copy"):
        assert word not in contents
    trace = load_trace(traces / "1b-bf16.json.gz")
    assert trace.entries[0]["frames"][0]["filename"] == "torch/a.py"
    assert trace.recipe_fields["data"] == "recipes/data/g.txt"
    assert trace.provenance["platform"] == "Linux x86_64 glibc2.39"
    measured = StepProfile.read(profiles / "h200/llama-3.1-8b-lora.measured.json")
    assert measured.top[0].stack == ["harness/training/step.py:3 f"]
    assert measured.recipe["data"] == "recipes/data/g.txt"


def test_the_calibration_is_what_the_estimates_then_read(brought, monkeypatch):
    _, profiles, _ = brought(*everything())
    monkeypatch.setattr(hardware, "profiles_folder", lambda: profiles)
    calibration = find_hardware("h200").calibration
    assert calibration.host_link_fraction == pytest.approx(0.5, rel=1e-4)
    assert calibration.cuda_context_bytes == 600 * 2**20
    assert calibration.host_op_s == Calibration().host_op_s
    assert "as measured on NVIDIA H200 (driver 999.1, torch 2.11.0+cu130)" in calibration.source


def test_the_machine_around_the_card_is_calibrated_where_that_is_asked(brought, monkeypatch):
    _, profiles, _ = brought(*everything(), arguments=("--host",))
    monkeypatch.setattr(hardware, "profiles_folder", lambda: profiles)
    calibration = find_hardware("h200").calibration
    assert (calibration.host_op_s, calibration.cuda_context_bytes) == (7e-6, 600 * 2**20)


def test_the_commit_is_filled_in_where_the_machine_had_no_repository(brought):
    measured = profile("measured", 20.0)
    measured["provenance"] = PROVENANCE | {"git_commit": "its own"}
    documents = [document("validate", ok("a", profile=profile("measured", 20.0)), ok("b", profile=measured))]
    _, profiles, _ = brought(*documents, arguments=("--commit", "abc123"))
    commits = {
        name: StepProfile.read(profiles / f"h200/{name}.measured.json").provenance["git_commit"]
        for name in "ab"
    }
    assert commits == {"a": "abc123", "b": "its own"}


def test_a_second_import_replaces_what_ran_again_and_nothing_else(brought):
    before = document(
        "validate", ok("a", profile=profile("measured", 20.0)), ok("b", profile=profile("measured", 9.0))
    )
    _, profiles, _ = brought(before)
    first = files_below(profiles)
    assert files_below(brought(before)[1]) == first
    not_run = {"name": "a", "status": "not run", "reason": "this part's time was used up"}
    brought(document("validate", not_run, ok("b", profile=profile("measured", 10.0)), started="later"))
    listed = json.loads((profiles / "h200/programme/validate.json").read_bytes())["results"]
    assert [(r["name"], r["status"], r["started"][:5]) for r in listed] == [
        ("a", "ok", "2026-"),
        ("b", "ok", "later"),
    ]
    now = files_below(profiles)
    assert now["h200/a.measured.json"] == first["h200/a.measured.json"]
    assert now["h200/b.measured.json"] != first["h200/b.measured.json"]


def test_a_device_that_is_in_no_table_has_its_own_folder_and_no_calibration(brought, capsys):
    device = DEVICE | {"name": "NVIDIA Thing-9000 (beta)", "table_name": "../../etc"}
    status, profiles, _ = brought(document("calibrate", *MEASUREMENTS, device=device))
    assert status == 0
    assert sorted(files_below(profiles)) == ["nvidia-thing-9000-beta/programme/calibrate.json"]
    assert "not in the hardware table" in capsys.readouterr().out


def test_small_models_and_cpus_are_never_taken_for_the_real_thing(brought, capsys):
    cpu = {"name": "Some CPU", "kind": "cpu", "table_name": None}
    documents = [each | {"device": cpu, "tiny": True} for each in everything()]
    status, profiles, traces = brought(*documents)
    assert status == 0
    assert {name.split("/")[0] for name in files_below(profiles)} == {"cpu"}
    assert "cpu/tiny-llama-3.1-8b-lora.measured.json" in files_below(profiles)
    assert not traces.exists()
    assert "say nothing about the CUDA allocator" in capsys.readouterr().out


REFUSED: dict[str, tuple[str, Any]] = {
    "no JSON": ("validate.json", "{"),
    "foreign": ("package.json", '{"name": "x"}'),
    "a list": ("validate.json", "[]"),
    "too deep": ("validate.json", "[" * 100_000),
    "another version": ("validate.json", document("validate") | {"version": 99}),
    "unknown part": ("rocket.json", document("rocket")),
    "called after another part": ("oom.json", document("validate")),
    "no device": ("validate.json", document("validate") | {"device": None}),
    "no results": ("validate.json", document("validate") | {"results": {}}),
    "unknown status": ("validate.json", document("validate", {"name": "a", "status": "splendid"})),
    "a path for a name": ("validate.json", document("validate", ok("../../etc/passwd"))),
    "a damaged profile": ("validate.json", document("validate", ok("a", profile={"schema_version": 1}))),
    "a profile of another source": (
        "validate.json",
        document("validate", ok("a", profile=profile("napkin", 1.0))),
    ),
    "no trace": ("traces.json", document("traces", ok("a", trace="@@@"))),
    "a damaged trace": ("traces.json", document("traces", ok("a", trace="AAAA"))),
    "an impossible calibration": (
        "calibrate.json",
        document("calibrate", ok("host-link", rows=[{"memory": "pinned", "bytes": 9e12, "s": 1.0}])),
    ),
}


@pytest.mark.parametrize(("name", "content"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_the_programmes_is_refused_before_anything_is_written(name, content, tmp_path, capsys):
    results = tmp_path / "results"
    results.mkdir()
    (results / "predict.json").write_text(json.dumps(document("predict")))
    (results / name).write_text(content if isinstance(content, str) else json.dumps(content))
    folders = ["--profiles", str(tmp_path / "p"), "--traces", str(tmp_path / "t")]
    assert main([str(results), *folders]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("benchmarks.gpu_programme.import_results: ")
    assert name in complaint
    assert complaint.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_an_empty_folder_and_two_devices_are_refused(brought, tmp_path, capsys):
    (tmp_path / "results").mkdir()
    assert brought()[0] == 2
    assert "holds no result" in capsys.readouterr().err
    other = document("oom", device=DEVICE | {"name": "NVIDIA L4", "table_name": "l4"})
    assert brought(document("validate"), other)[0] == 2
    assert "NVIDIA H200, NVIDIA L4" in capsys.readouterr().err


@pytest.fixture
def profiles(tmp_path) -> Path:
    """Three recipes on an H200: one predicted well, one badly, one that does not fit."""
    folder = tmp_path / "h200"
    folder.mkdir()
    ran_out = {"oom": out_of_memory(), "complete": False}
    for name, profiles in {
        "good": [profile("measured", 20.0), profile("simulated", 20.02), profile("napkin", 21.0)],
        "bad": [
            profile("measured", 20.0, activations_gib=6.0),
            profile("simulated", 18.0, step_s=0.25),
            profile("napkin", 15.0),
        ],
        "too-large": [profile("measured", 3.0, **ran_out), profile("simulated", 4.0, **ran_out)],
    }.items():
        for each in profiles:
            (folder / f"{name}.{each['source']}.json").write_text(json.dumps(each))
    return tmp_path


def row(text: str, name: str, table: int = 0) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith((f"| [{name}]", f"| {name} |"))]
    return [cell.strip() for cell in lines[table].strip("|").split("|")]


def test_the_document_has_a_row_for_every_recipe(profiles):
    text = profiles_readme.readme(profiles)
    good = row(text, "good")
    assert good[0] == "[good](h200/good.measured.json)"
    assert good[1:5] == ["1 x 2048", "21.000", "20.020", "20.000"]
    assert good[5:7] == ["1.0500", "1.0010"]
    assert good[7:] == ["22.000", "1.0009", "23.000", "1.0009"]
    assert row(text, "bad", 1)[1:] == ["500.0", "250.0", "500.0", "1.0000", "0.5000", "4,096", "25.0%"]
    assert row(text, "too-large")[2:5] == ["-", "out of memory", "out of memory"]
    for fact in ("2026-01-02", "torch: 2.11.0+cu130", "expandable_segments:True", "commit: unknown"):
        assert fact in text


def test_where_the_estimates_fail_says_how_much_and_where(profiles):
    text = profiles_readme.readme(profiles)
    failing = text.split("### Where the estimates fail")[1].splitlines()
    said = [line for line in failing if line.startswith("- bad: simulated peak allocated is 0.9000")]
    assert len(said) == 1
    # 20 GiB with 6 of activations, where 18 GiB with 4 were predicted: the 2 GiB are activations, in backward
    assert "by category: activations +2.000 GiB; " in said[0]
    assert "by phase: backward +2.000 GiB" in said[0]
    assert any(line.startswith("- bad: napkin peak allocated is 0.7500") for line in failing)
    assert any(line.startswith("- bad: simulated step time is 0.5000") for line in failing)
    assert any(line == "- too-large: there is no napkin profile" for line in failing)
    assert not any(line.startswith("- good:") for line in failing)


def test_how_far_off_is_counted_over_all_recipes(profiles):
    text = profiles_readme.readme(profiles)
    # errors of 0.1 % and 10 %: the median of two is halfway
    line = "- simulated, peak allocated: off by 5.05% in the median and 10.00% at most, of 2 recipes (bars"
    assert line in text
    assert "napkin, peak allocated: off by 15.00% in the median and 25.00% at most" in text


def test_the_parts_have_their_tables(profiles):
    programme = profiles / "h200" / "programme"
    programme.mkdir()
    run = {"peak_allocated_bytes": 8 * GIB, "peak_reserved_bytes": 10 * GIB}
    parts = [
        document(
            "peers",
            ok(
                "a.harness.1",
                recipe="a",
                contender="harness",
                median_step_s=0.9,
                step_s=[0.9, 0.9, 1.17],
                **run,
            ),
            ok(
                "a.trainer.1",
                recipe="a",
                contender="trainer",
                median_step_s=1.0,
                **run | {"peak_reserved_bytes": 20 * GIB},
            ),
            {"name": "a.sft-trainer.1", "status": "skipped", "reason": "needs trl, not installed here"},
        ),
        document(
            "cases",
            ok("base", profile=profile("measured", 20.0)),
            ok("batch-2", profile=profile("measured", 24.0, step_s=0.25)),
        ),
        document("calibrate", ok("launch", processor="Thing", operator_s=29e-6, alone_s=18e-6)),
        document(
            "overhead",
            ok(
                "a.recording-off",
                recipe="a",
                recording="off",
                bar=1.01,
                **{"ratio": 1.005, "ratio_low": 0.99, "ratio_high": 1.02},
                harness_median_s=1.005,
                bare_median_s=1.0,
            ),
        ),
        document(
            "oom",
            ok(
                "activations.measured",
                run=["x", "y=1"],
                exit_status=3,
                oom={"phase": "forward", "requested_bytes": GIB},
            ),
        ),
    ]
    for each in parts:
        (programme / f"{each['part']}.json").write_text(json.dumps(each))
    alike = {"operators": 2, "measured_ms": 4.0, "estimated_ms": 3.0, "median_error": None}
    kernels = {"recipes": {}, "kinds": {"product": alike}, "all": alike}
    (profiles / "h200" / "kernels.json").write_text(json.dumps(kernels))
    (profiles / "h200" / "calibration.json").write_text('{"source": "by hand", "matmul_fraction": 0.81234}')
    text = profiles_readme.readme(profiles)
    assert row(text, "a", 0) == ["a", "off", "1,005.0", "1,000.0", "1.0050", "0.9900 to 1.0200", "1.0100"]
    assert row(text, "a", 1) == ["a", "trainer", "0.9000", "1.0000", "0.5000"]
    assert row(text, "batch-2") == ["batch-2", "250.0", "8,192", "2.0000", "24.000", "1.2000", "25.0%"]
    assert row(text, "activations.measured")[1:5] == ["`x y=1`", "3", "forward", "1.000"]
    assert "the slowest takes 30% longer than the median step in the median of 1 runs" in text
    assert "- an operator in a step: 29.0 us; estimates take 17 us" in text
    assert row(text, "product") == ["product", "2", "4.0", "3.0", "0.7500", "-"]
    assert "- matmul_fraction: 0.8123" in text
    assert "- peers, a.sft-trainer.1: skipped, needs trl, not installed here" in text


def test_a_stale_document_is_noticed(profiles, capsys):
    given = ["--profiles", str(profiles)]
    assert profiles_readme.main([*given, "--check"]) == 1
    assert "is stale" in capsys.readouterr().err
    assert profiles_readme.main(given) == 0
    assert profiles_readme.main([*given, "--check"]) == 0
    (profiles / "h200" / "good.measured.json").write_text("{")
    assert profiles_readme.main(given) == 2
    assert "good.measured.json" in capsys.readouterr().err


def test_predictions_are_renewed_beside_what_was_measured(tmp_path, monkeypatch):
    folder = tmp_path / "l4"
    folder.mkdir()
    measured = profile("measured", 20.0)
    measured["recipe"] = RECIPE | {"model": "tiny-llama-bytes", "seq_len": 16}
    (folder / "a.measured.json").write_text(json.dumps(measured))
    monkeypatch.setattr(predict, "_napkin", lambda *given: 1 / 0)
    (folder / "a.napkin.json").write_text("of an older day")
    assert predict.main([str(folder)]) == 0
    simulated = StepProfile.read(folder / "a.simulated.json")
    assert str(ROOT) not in simulated.to_json()
    assert simulated.hardware.name == "l4"
    # the measured run's settings and its PyTorch's order of free blocks, not this machine's
    assert "expandable_segments=True" in simulated.provenance["allocator"]
    assert "free_block_order='address'" in simulated.provenance["allocator"]
    assert not (folder / "a.napkin.json").exists()
    assert predict.main([str(tmp_path / "h200")]) == 2
