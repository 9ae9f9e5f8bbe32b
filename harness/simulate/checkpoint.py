"""A simulated checkpoint: the libraries' own code on shape-only tensors, up to where it writes files."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.observe import storage_of, tensors_in
from harness.recipe import Recipe
from harness.simulate.device import SimulatedDevice
from harness.step_profile import CheckpointStats
from harness.system import Replacement, all_replaced
from harness.training import LoopObserver, Training, save_as_trainer, to_host


def simulate_checkpoint(
    recipe: Recipe, training: Training, device: SimulatedDevice, observer: LoopObserver, *, whole_state: bool
) -> CheckpointStats:
    """Do to memory what writing a checkpoint does, and return its sizes; no file is left. `whole_state` is
    false where the weights alone are written."""
    files = _Files(recipe, device)
    with device.memory.host_peak() as host_peak, tempfile.TemporaryDirectory() as folder:
        with all_replaced(files.replacements()):
            written = save_as_trainer(recipe, training, Path(folder), observer, whole=whole_state)
        return CheckpointStats(
            weights_bytes=files.weights_bytes or written.weights_bytes,
            optimizer_bytes=written.optimizer_bytes,
            part=written.part,
            host_bytes=host_peak(),
        )


class _Files:
    """Functions that replace those which write tensors into files: they make the same copies, and count."""

    def __init__(self, recipe: Recipe, device: SimulatedDevice) -> None:
        self._recipe, self._device = recipe, device
        self.weights_bytes = 0
        """The bytes of all tensors in safetensors files."""

    def replacements(self) -> Iterator[Replacement]:
        """The functions of the libraries that are replaced while the checkpoint is written."""
        why = "wants the values of what it writes"
        if self._recipe.trains_base:
            yield Replacement("transformers.modeling_utils.safe_save_file", self._safetensors, why)
        else:
            yield Replacement("peft.peft_model.safe_save_file", self._safetensors, why)
            same = "takes all shape-only tensors for one, by their address, and copies them"
            name = "peft.peft_model.id_tensor_storage"
            yield Replacement(name, lambda tensor: tensor.untyped_storage()._cdata, same)
        yield Replacement("torch.save", self._one_by_one, why)
        yield Replacement("torch.distributed.checkpoint.save", self._one_by_one, why)
        to_device = self._to_device(torch.Tensor.to)
        yield Replacement("torch.Tensor.to", to_device, "a part on the host comes to be gathered")

    def _safetensors(self, tensors: Mapping[str, Tensor], *_: Any, **__: Any) -> None:
        """safetensors.torch.save_file: every tensor of the file is copied before the first is written."""
        copies = [self._copied(tensor) for tensor in tensors.values()]
        self.weights_bytes += sum(tensor.nbytes for tensor in tensors.values())
        del copies

    def _one_by_one(self, tree: Any, *_: Any, **__: Any) -> None:
        """torch.save, and a rank's parts: one storage after the other is copied and written. (On a GPU the
        writer of parts has up to 10 MB of small ones under way: FileSystemWriter, per_thread_copy_ahead.)"""
        storages = {storage_of(tensor)._cdata: tensor for tensor in tensors_in(tree)}
        for tensor in storages.values():
            self._copied(getattr(tensor, "_local_tensor", tensor))

    def _to_device(self, to: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Tensor.to, which copies a tensor from host memory to the device although both are `meta`."""

        def on_device(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if args and args[0] == "meta" and self._device.key_of(tensor) in self._device.on_host:
                return tensor.clone()
            return to(tensor, *args, **kwargs)

        return on_device

    def _copied(self, tensor: Tensor) -> Tensor | None:
        """A copy of the tensor in host memory; None where it is there already."""
        key = self._device.key_of(tensor) if tensor.is_meta else None
        if not tensor.is_meta or key in self._device.on_host:
            return None
        return to_host(tensor)
