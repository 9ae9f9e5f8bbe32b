"""Instruments that two answers share while a step runs: trackers of storages, labels, recordings, FLOPs."""

from harness.observe.convolutions import Convolution
from harness.observe.flops import FlopCount, operator_flops
from harness.observe.frames_of_error import failed_request
from harness.observe.labels import (
    Owner,
    gradients_seen,
    labelled_tensors,
    model_tensors,
    module_paths,
    owned_tensors,
    tensors_in,
)
from harness.observe.phase_peaks import PhasePeaks
from harness.observe.recording import Recording
from harness.observe.storage_tracker import Frame, StorageTracker, storage_of
