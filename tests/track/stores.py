"""What trackers were told, read from what they wrote: each by its own library, or from its file's format."""

import struct
from pathlib import Path
from typing import Any

Told = dict[str, list[tuple[int, float]]]
"""By name: step and value, in order."""


def of_tensorboard(folder: Path) -> Told:
    """By TensorBoard's own reader of event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {
        name: [(event.step, event.value) for event in reader.Scalars(name)]
        for name in reader.Tags()["scalars"]
    }


def of_mlflow(store: Path) -> dict[str, tuple[Any, Told]]:
    """By MLflow's own client: each run's record and metrics, by its name."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store.as_uri())
    (experiment,) = [one for one in client.search_experiments() if one.name == "harness"]
    runs = client.search_runs([experiment.experiment_id])
    return {
        str(run.info.run_name): (
            run,
            {
                name: sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, name))
                for name in run.data.metrics
            },
        )
        for run in runs
    }


def of_wandb(folder: Path) -> list[Any]:
    """The records of an offline run: a log of blocks of 32 KiB, as LevelDB's, of W&B's protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    # accelerate 1.10 ends the run that it began, and begins another with the configuration
    file = max(folder.glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_size)
    content, at, records, part = file.read_bytes(), 7, [], b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        part += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            records.append(Record.FromString(part))
            part = b""
    return records
