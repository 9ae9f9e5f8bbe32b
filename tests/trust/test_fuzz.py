"""Whatever a file holds: an answer or one clear sentence, never a traceback, a hang, or a file elsewhere.

A small seeded set here; `make fuzz` tries FUZZ examples of each kind, 20,000 and more in all.
"""

import json
import math
import pickle
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from harness.allocator.settings import parse_settings
from harness.answers import asked_by_one, compare
from harness.data.documents import read_examples
from harness.hardware.hardware import find_hardware, read_prices
from harness.napkin.prediction import predict
from harness.recipe import Recipe, check_recipe, load_recipe, recipe_yaml
from harness.report import read_run, report_html, report_tables, section_of, to_csv, to_markdown
from harness.snapshot import (
    breakdown_at,
    diff_held,
    find_leaks,
    find_peak,
    held_at,
    read_snapshot,
    recording_of,
    remedy,
    snapshot_to_json,
    spans_from_trace,
    top_allocations,
)
from harness.step_profile.step_profile import StepProfile
from harness.system.strict_yaml import to_yaml
from harness.training.batches import build_batches
from tests.support.attempts import Count, attempt, fuzzed, written
from tests.support.commands import exit_status
from tests.support.fuzzed import (
    MODELS,
    PICKLES,
    RECIPES,
    as_json,
    changed,
    integers,
    junk,
    profile_document,
    recipe_fields,
    scalars,
    snapshot_document,
    spliced,
    texts,
)
from tests.support.watched import watched


@cache
def recipe_texts() -> list[bytes]:
    return [path.read_bytes() for path in RECIPES]


def read_whole(snapshot: dict[str, Any]) -> None:
    """All that the project does with a snapshot."""
    snapshot_to_json(snapshot)
    recording = recording_of(snapshot)
    trace = recording.trace
    spans = spans_from_trace(trace, segments=snapshot["segments"])
    breakdown_at(spans, find_peak(spans).index)
    top_allocations(spans, len(trace) // 2)
    asked_by_one(snapshot, snapshot)
    held = held_at(recording, recording.moment)
    diff_held(held, held_at(recording, recording.peak)).as_json()
    find_leaks(recording, snapshot.get("external_annotations")).as_json()
    if recording.oom is not None:
        remedy(recording.oom)


@given(content=spliced(recipe_texts(), b": -\n#{}[]&*!|>'\"%@`?,\t\xef\xbb\xbf"))
@fuzzed
def test_recipe_bytes(content: bytes, folder: Path, count: Count) -> None:
    """Recipe files: bytes changed, cut and put in."""
    path = written(folder, "recipe.yaml", content)
    loaded = attempt(count, folder, lambda: load_recipe(str(path)))
    if loaded is not None:
        again = written(folder, "again.yaml", recipe_yaml(loaded[1]).encode())
        assert load_recipe(str(again))[1] == loaded[1]


@given(fields=recipe_fields, model=st.sampled_from(MODELS))
@fuzzed
def test_recipe_fields(fields: dict[str, Any], model: Path, folder: Path, count: Count) -> None:
    """Recipes over the schema: every field, with values it may and may not have; napkin on the result."""
    try:
        content = to_yaml({"model": str(model), **fields}).encode()
    except UnicodeEncodeError:
        content = b"model: \xff"
    path = written(folder, "recipe.yaml", content)

    def ask() -> bool:
        predict(load_recipe(str(path))[1], find_hardware("h100")).to_json()
        return True

    attempt(count, folder, ask)


@given(overrides=st.lists(st.tuples(st.sampled_from(sorted(Recipe.model_fields)), scalars), max_size=4))
@fuzzed
def test_overrides(overrides: list[tuple[str, Any]], folder: Path, count: Count) -> None:
    """Overrides on the command line: any text."""
    attempt(count, folder, lambda: load_recipe("smoke", [f"{key}={value}" for key, value in overrides]))


@given(data=st.data(), base=st.sampled_from(MODELS))
@fuzzed
def test_model_configs(data: st.DataObject, base: Path, folder: Path, count: Count) -> None:
    """Model configs: values of a config.json replaced, removed, made huge; napkin on the result."""
    config = data.draw(changed(json.loads(base.read_text())))
    path = written(folder, "config.json", as_json(config))
    recipe = Recipe(model=str(path), seq_len=64)
    attempt(count, folder, lambda: predict(recipe, find_hardware("h100")).to_json())


@given(content=spliced([path.read_bytes() for path in MODELS]))
@fuzzed
def test_model_config_bytes(content: bytes, folder: Path, count: Count) -> None:
    """Model configs: bytes changed, cut and put in."""
    path = written(folder, "config.json", content)
    recipe = Recipe(model=str(path), seq_len=64)
    attempt(count, folder, lambda: predict(recipe, find_hardware("h100")).to_json())


@given(
    content=spliced(
        [b'{"text": "one"}\n{"prompt": "a", "completion": "b"}\n' * 3, "Über\n\nzwei Absätze.\r\n".encode()],
        b'{}[]":,\n\r\\u\xf0\x9f\x98\x80\xed\xa0\x80\0',
    ),
    suffix=st.sampled_from([".txt", ".jsonl"]),
    packing=st.booleans(),
)
@fuzzed
def test_data_files(content: bytes, suffix: str, packing: bool, folder: Path, count: Count) -> None:
    """Data files, .txt and .jsonl: bytes changed, cut and put in; two steps of batches from the rest."""
    path = written(folder, f"data{suffix}", content)

    def ask() -> None:
        list(read_examples(str(path), paragraphs=packing))
        recipe = Recipe(
            model="tiny-llama-bytes", data=str(path), packing=packing, seq_len=8, micro_batch_size=2
        )
        batches = build_batches(recipe, vocab_size=260, tokenizer_source=None, dense_mask=True)
        next(batches)
        next(batches)

    attempt(count, folder, ask)


@given(rows=st.lists(texts.map(lambda text: {"text": text}) | junk, max_size=4))
@fuzzed
def test_data_rows(rows: list[Any], folder: Path, count: Count) -> None:
    """Data files: lines of any JSON."""
    lines = [as_json(row) for row in rows]
    path = written(folder, "data.jsonl", b"\n".join(lines))
    attempt(count, folder, lambda: list(read_examples(str(path), paragraphs=False)))


@given(data=st.data())
@fuzzed
def test_profiles(data: st.DataObject, folder: Path, count: Count) -> None:
    """profile.json: values replaced, removed, made huge; compared with the whole one if it reads."""
    document = data.draw(changed(profile_document()))
    path = written(folder, "profile.json", as_json(document))

    def ask() -> None:
        profile = StepProfile.read(path)
        check_recipe(profile.recipe, str(path))
        whole = StepProfile.model_validate({**profile_document(), "source": "measured"})
        compare([profile, whole]).as_json()
        profile.to_json()

    attempt(count, folder, ask)


@given(content=spliced([as_json(profile_document())], b'{}[]":,-0123456789eE.nultrfas'))
@fuzzed
def test_profile_bytes(content: bytes, folder: Path, count: Count) -> None:
    """profile.json: bytes changed, cut and put in."""
    path = written(folder, "profile.json", content)
    attempt(count, folder, lambda: StepProfile.read(path))


OPCODES = bytes(range(0x28, 0x98))


@given(content=spliced([*PICKLES, snapshot_to_json(snapshot_document()).encode()], OPCODES))
@fuzzed
def test_snapshot_bytes(content: bytes, folder: Path, count: Count) -> None:
    """Snapshots, pickles of every protocol and JSON: bytes changed, cut and put in; analysed if they read."""
    path = written(folder, "snapshot.pickle", content)
    attempt(count, folder, lambda: read_whole(read_snapshot(path)))


@given(data=st.data(), protocol=st.sampled_from([2, 3, 4, 5, None]))
@fuzzed
def test_snapshots(data: st.DataObject, protocol: int | None, folder: Path, count: Count) -> None:
    """Snapshots: values replaced, removed, made huge; analysed if they read."""
    document = data.draw(changed(snapshot_document()))
    content = as_json(document) if protocol is None else pickle.dumps(document, protocol)
    path = written(folder, "snapshot.pickle", content)
    attempt(count, folder, lambda: read_whole(read_snapshot(path)))


@given(data=st.data(), protocol=st.sampled_from([2, 4, None]))
@fuzzed
def test_reports_of_snapshots(data: st.DataObject, protocol: int | None, folder: Path, count: Count) -> None:
    """Reports of snapshots whose values are replaced, removed, made huge."""
    document = data.draw(changed(snapshot_document()))
    content = as_json(document) if protocol is None else pickle.dumps(document, protocol)
    path = written(folder, "snapshot.pickle", content)
    attempt(count, folder, lambda: report_html([read_run(path)]).encode())


@given(data=st.data())
@fuzzed
def test_reports_of_profiles(data: st.DataObject, folder: Path, count: Count) -> None:
    """Reports, Markdown and CSV of profiles whose values are replaced, removed, made huge."""
    whole = written(folder, "profile.json", as_json(profile_document()))
    path = written(folder, "changed.json", as_json(data.draw(changed(profile_document()))))

    def ask() -> None:
        runs = [read_run(path), read_run(whole)]
        report_html(runs).encode()
        tables = report_tables([section_of(run) for run in runs])
        to_csv(tables).encode()
        to_markdown(tables).encode()

    attempt(count, folder, ask)


@given(text=st.text(max_size=60) | st.lists(scalars, max_size=4).map(lambda v: ",".join(map(str, v))))
@fuzzed
def test_allocator_settings(text: str, folder: Path, count: Count) -> None:
    """Allocator settings: any text, and known options with any value."""
    attempt(count, folder, lambda: parse_settings(text))


OPTIONS = ["expandable_segments", "max_split_size_mb", "garbage_collection_threshold"]
OPTIONS += ["roundup_power2_divisions"]


@given(
    option=st.sampled_from(OPTIONS),
    value=integers | st.floats() | st.text(max_size=20) | st.just("[256:1,512:2,>:8]"),
)
@fuzzed
def test_allocator_options(option: str, value: Any, folder: Path, count: Count) -> None:
    """Allocator settings: known options with any value."""
    attempt(count, folder, lambda: parse_settings(f"{option}:{value}"))


@given(
    content=spliced([b"h100: 2.5\nl4: 0.7\n"], b": \n{}[]0123456789"),
    pair=st.sampled_from(["h100=3", "l4=0", "h200=1e3", "l4=nan", "t5=1"]) | st.text(max_size=20),
)
@fuzzed
def test_prices(content: bytes, pair: str, folder: Path, count: Count) -> None:
    """Price lists: any bytes, any pair on the command line."""
    path = written(folder, "prices.yaml", content)

    def ask() -> None:
        assert all(math.isfinite(price) for price in read_prices(path, [pair]).values())

    attempt(count, folder, ask)


WORDS = [
    *("napkin", "fit", "hardware", "shard", "recipes", "show", "schema", "snapshot", "to-json", "report"),
    *(
        *("smoke", "llama-3.1-8b-lora", "no-such", "here.yaml", "snapshot.pickle"),
        *("profile.json", "missing.json"),
    ),
    *("--json", "--out", "out.json", "--memory", "16GiB", "0", "--help", "--hardware", "h100", "hardware=l4"),
    *("seq_len=4096", "micro_batch_size=2", "steps=", "=3", "--price", "h100=2", "--margin", "2", "-1", ""),
]


@given(arguments=st.lists(st.sampled_from(WORDS) | st.text(max_size=12), max_size=5))
@fuzzed
def test_command_lines(arguments: list[str], folder: Path, count: Count, capsys: Any) -> None:
    """Whole command lines: words it knows and any others, in any order."""
    if {"simulate", "validate", "--exact"} & set(arguments):  # seconds each: their readers are fuzzed above
        arguments = [
            "napkin",
            *[word for word in arguments if word not in ("simulate", "validate", "--exact")],
        ]
    if arguments[:1] == ["fit"]:  # by arithmetic, for the same reason
        arguments.insert(1, "--quick")
    written(folder, "here.yaml", b"model: llama-3.2-1b\n")
    written(folder, "snapshot.pickle", PICKLES[4])
    written(folder, "profile.json", as_json(profile_document()))
    count.inputs += 1
    with chdir(folder), watched(folder):
        status = exit_status(*arguments)
    out, err = capsys.readouterr()
    assert status in (0, 2, 3), arguments
    count.refused += status != 0
    assert "Traceback" not in out + err
