"""The loss of each step, read without a synchronization: copied to the host as it is made, and read later."""

import torch
from torch import Tensor


class Losses:
    """The values that backward began at, summed over the micro batches of a step."""

    def __init__(self) -> None:
        self._of_step: list[float | Tensor | None] = []
        self._free: dict[torch.dtype, list[Tensor]] = {}
        """Pinned scalars that are not in use, by dtype."""

    def add(self, root: Tensor) -> None:
        """Add one of the step's losses. A root that is not a single number counts as unknown."""
        if root.numel() != 1 or not root.is_floating_point() or root.device.type == "meta":
            self._of_step.append(None)
        elif root.device.type == "cpu":
            self._of_step.append(root.item())
        else:
            self._of_step.append(self._copied(root.detach().reshape(())))

    def of_step(self) -> list[float | Tensor | None]:
        """The losses since the last call."""
        found, self._of_step = self._of_step, []
        return found

    def value(self, losses: list[float | Tensor | None]) -> float | None:
        """The sum of a step's `losses`, asked once, when the step's work is done; None if one is unknown."""
        known = [float(loss) for loss in losses if loss is not None]
        for loss in losses:
            if isinstance(loss, Tensor):
                self._free[loss.dtype].append(loss)
        return sum(known) if known and len(known) == len(losses) else None

    def _copied(self, loss: Tensor) -> Tensor:
        free = self._free.setdefault(loss.dtype, [])
        # a copy into pinned memory of the same type makes nothing on the GPU
        slot = free.pop() if free else torch.empty((), dtype=loss.dtype, pin_memory=True)
        return slot.copy_(loss, non_blocking=True)
