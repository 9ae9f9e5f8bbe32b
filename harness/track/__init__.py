"""Experiment trackers: a process beside the run reads its log and reports to TensorBoard, MLflow, W&B and
others.

What measures knows of no tracker, and a tracker that fails, hangs or is missing stops nothing: all that it
would get is in log.jsonl. The trackers are accelerate's, so none is a dependency. Imports no torch.
"""
# pyright: reportUnusedImport=false

from harness.track.jobs import Job, profile_values, recipe_config
from harness.track.trackers import tracker_names
from harness.track.tracking import followed, track_all, track_run
