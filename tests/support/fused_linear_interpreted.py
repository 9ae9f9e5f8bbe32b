"""One step with the standard loss and one with Liger's, for each setting in the first argument (JSON); or, of
one that has `kernels`, with the standard kernels and with those.

Liger's kernels are Triton's. Triton interprets them on a CPU if TRITON_INTERPRET=1 is set before it is
imported, so this is a program of its own; training/toggles/test_loss.py runs it and looks at what it prints.
"""

import gc
import json
import sys
from importlib import import_module
from typing import Any

import numpy
from torch import Tensor
from triton import language
from triton.runtime import interpreter

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
    by_liger = fields if "kernels" in fields else fields | {"loss": "fused_linear"}
    standard = {name: value for name, value in fields.items() if name != "kernels"}
    loss, gradients, peak_bytes = one_step(**standard)
    fused_loss, fused_gradients, fused_peak_bytes = one_step(**by_liger)
    assert one_step(**standard)[0] == loss  # what Liger replaces of a family, other models of it keep
    assert fused_gradients.keys() == gradients.keys()
    apart = [(fused_gradients[n] - g).norm() / g.norm() for n, g in gradients.items() if g.any()]
    return {
        "losses": [loss, fused_loss],
        "gradients_apart": max(map(float, apart)),
        "gradients": len(apart),
        "forward_peak_bytes": [peak_bytes, fused_peak_bytes],
    }


def complete_the_interpreter() -> None:
    """Triton's interpreter hands a kernel a number of Python where a GPU hands it one of fp32, which Liger's
    activation converts."""
    plain = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if not isinstance(value, float):
            return plain(value)
        number = interpreter.TensorHandle(numpy.array([value], dtype=numpy.float32), language.float32)
        return language.tensor(number, language.float32)

    interpreter._implicit_cvt = converted
    # of libdevice, which is a GPU's, the interpreter has no values
    vars(import_module("liger_kernel.ops.rms_norm"))["rsqrt"] = lambda x: language.math.rsqrt(x)
    vars(import_module("liger_kernel.ops.geglu"))["tanh"] = lambda x: 2 * language.sigmoid(2 * x) - 1


if __name__ == "__main__":
    complete_the_interpreter()
    gc.set_threshold(20)  # the interpreter leaves its copies in reference cycles
    print(json.dumps([compared(fields) for fields in json.loads(sys.argv[1])]))
