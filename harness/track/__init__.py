"""Experiment trackers: when a run is over, it is reported to TensorBoard, MLflow, W&B and others.

What measures knows of no tracker, and one that fails, hangs or is missing stops nothing: all that it would
get is in the run folder. The trackers are accelerate's, so none is a dependency. Imports no torch.
"""
# pyright: reportUnusedImport=false

from harness.track.told import Told, profile_values, recipe_config
from harness.track.trackers import tracker_names
from harness.track.tracking import track_all, track_run
