"""One step with the standard loss and one with Liger's, for each setting in the first argument (JSON).

Liger's kernels are Triton's. Triton interprets them on a CPU if TRITON_INTERPRET=1 is set before it is
imported, so this is a program of its own; training/toggles/test_loss.py runs it and looks at what it prints.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

from torch import Tensor

from tests.support.tiny import ByteObserver, built, step, tiny


def one_step(**fields: Any) -> tuple[float, dict[str, Tensor], int]:
    """The loss, the gradients, and the most bytes that were allocated in forward."""
    observer = ByteObserver()
    training, batches = built(tiny(**({"micro_batch_size": 1} | fields)), observer)
    gradients: dict[str, Tensor] = {}

    def look() -> None:
        named = training.model.named_parameters()
        gradients.update({name: p.grad.double() for name, p in named if p.grad is not None})

    observer.beginning["optimizer_step"] = look
    return step(training, batches, observer).item(), gradients, observer.peak_bytes["forward"]


def compared(fields: dict[str, Any]) -> dict[str, Any]:
    """Both losses and peaks, and by how much the gradients differ at most, relative to their norm."""
    loss, gradients, peak_bytes = one_step(**fields)
    fused_loss, fused_gradients, fused_peak_bytes = one_step(**fields, loss="fused_linear")
    assert fused_gradients.keys() == gradients.keys()
    apart = [(fused_gradients[n] - g).norm() / g.norm() for n, g in gradients.items() if g.any()]
    return {
        "losses": [loss, fused_loss],
        "gradients_apart": max(map(float, apart)),
        "gradients": len(apart),
        "forward_peak_bytes": [peak_bytes, fused_peak_bytes],
    }


if __name__ == "__main__":
    gc.set_threshold(20)  # the interpreter leaves its copies in reference cycles
    print(json.dumps([compared(fields) for fields in json.loads(sys.argv[1])]))
