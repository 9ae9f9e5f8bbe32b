"""Requests that PyTorch's own allocator refuses: its message has the bytes, the code here the line."""

import re
from types import FunctionType

import pytest
import torch
from peft import LoraConfig, get_peft_model

from harness.observe import failed_request

HUGE = 2**48
"""Numbers: more than any machine can address."""


def asked(program: FunctionType) -> tuple[str | None, str | None, int]:
    """What is said of the request that fails, and the line at which the program's function begins."""
    with pytest.raises(RuntimeError) as caught:
        program()
    tried = re.search(r"tried to allocate (\d+) bytes", str(caught.value))
    assert tried
    said = failed_request(caught.value, int(tried[1]))
    return said["requested_at"], said["requested_is"], program.__code__.co_firstlineno


def test_a_tensor_of_the_line_that_asks_is_named_in_the_dtype_that_was_asked_for() -> None:
    def upcast() -> torch.Tensor:
        logits = torch.zeros(1, 1, dtype=torch.bfloat16).expand(4, HUGE)
        return logits.float()

    at, what, begins = asked(upcast)
    assert what == f"as large as logits in fp32: 4 × {HUGE:,} × 4 B"
    assert at == f"test_frames_of_error.py:{begins + 2} upcast"


def test_the_line_of_the_model_is_told_and_not_that_of_torch() -> None:
    """What fails is in torch/nn/modules/linear.py."""
    head = torch.nn.Linear(1, 1, bias=False)
    head.weight, head.out_features = torch.nn.Parameter(torch.zeros(1, 1).expand(HUGE, 1)), HUGE

    def model() -> torch.Tensor:
        return head(torch.zeros(3, 1))

    at, what, begins = asked(model)
    assert what == f"output of a Linear of 1 to {HUGE:,}: 3 × {HUGE:,} × 4 B"
    assert at == f"test_frames_of_error.py:{begins + 1} model"


def test_a_line_of_peft_comes_with_the_line_of_the_model_that_called_it() -> None:
    layers = torch.nn.ModuleDict({"head": torch.nn.Linear(1, 1, bias=False)})
    model = get_peft_model(layers, LoraConfig(target_modules=["head"]))
    weight = torch.nn.Parameter(torch.zeros(1, 1).expand(HUGE, 1))
    layers["head"].base_layer.weight, layers["head"].base_layer.out_features = weight, HUGE

    def forward() -> torch.Tensor:
        return model.base_model.model["head"](torch.zeros(3, 1))

    at, what, begins = asked(forward)
    assert what == f"output of a Linear of 1 to {HUGE:,}: 3 × {HUGE:,} × 4 B"
    assert re.fullmatch(
        rf"peft/\S+:\d+ forward, called from test_frames_of_error.py:{begins + 1} forward", at or ""
    )


def test_what_nothing_is_as_large_as_has_its_line_alone() -> None:
    def program() -> torch.Tensor:
        small = torch.zeros(8)
        return torch.zeros(HUGE - small.numel())

    at, what, begins = asked(program)
    assert (at, what) == (f"test_frames_of_error.py:{begins + 2} program", None)
