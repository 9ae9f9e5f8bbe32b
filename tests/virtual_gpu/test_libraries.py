"""Libraries with kernels of their own on a virtual GPU. Those of cuFFT, cuSOLVER and cuSPARSE compute
nothing; those that Python launches by Triton take the time of the bytes of their tensors."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.hardware import find_hardware
from harness.kernel_time import attention, memory
from harness.kernels.operator_time import FLEX_RATES
from harness.recipe import load_recipe
from harness.simulate import simulate
from harness.step_profile import StepProfile

pytestmark = pytest.mark.virtual_gpu

H100 = find_hardware("h100")
OF_THE_PROGRAM = """
import torch, triton, triton.language as tl
@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)
x = torch.zeros(1 << 20, device="cuda")
w = torch.nn.Parameter(torch.zeros(8, device="cuda"))
optimizer = torch.optim.SGD([w], lr=0.1)
for step in range(3):
    double[(1024,)](x, x.numel(), BLOCK=1024)
    w.sum().backward()
    optimizer.step()  # the clock starts at the first one
    if step == 0:
        @torch.library.custom_op("late::triple", mutates_args=(), device_types="cuda")
        def triple(x: torch.Tensor) -> torch.Tensor:
            return x * 3
    triple(x)
"""
COMPILED = """
import json, torch
from torch.profiler import ProfilerActivity, profile
x = torch.zeros(1 << 28, device="cuda", dtype=torch.bfloat16)
w = torch.nn.Parameter(torch.zeros(8, device="cuda"))
optimizer = torch.optim.SGD([w], lr=0.1)
compiled = torch.compile(lambda x: (x * 2).sigmoid() + x)
def step():
    compiled(x)
    w.sum().backward()
    optimizer.step()
for _ in range(4):
    step()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
    compiled(x)
held = torch.cuda.memory_allocated()
print(json.dumps({row.key: row.device_time_total for row in profiled.key_averages()} | {"held": held}))
"""

FLEX = """
import json, torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
def mask_of(device, document):
    documents = (torch.arange(4096) // document).to(device)
    def sees(batch, head, query, key):
        return (query >= key) & (documents[query] == documents[key])
    made_by = torch.compile(create_block_mask) if COMPILED and device == "cuda" else create_block_mask
    return made_by(sees, None, None, 4096, 4096, device=device)
compiled = torch.compile(flex_attention)
q, k, v = (torch.zeros(2, heads, 4096, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
w = torch.nn.Parameter(q)
optimizer = torch.optim.SGD([w], lr=0.1)
for _ in range(3):
    mask = mask_of("cuda", DOCUMENT)
    compiled(w, k, v, block_mask=mask, enable_gqa=True).sum().backward()
    optimizer.step()
counted = mask_of("cpu", DOCUMENT)
print(int(counted.kv_num_blocks.sum() + counted.full_kv_num_blocks.sum()))
"""


def operations(emulate: Any, folder: Path, code: str) -> tuple[dict[str, dict[str, Any]], Any]:
    """What ran in the last step, by name; and the finished process."""
    (folder / "program.py").write_text(code, encoding="utf-8")  # Triton reads the source
    done = emulate(sys.executable, "program.py", options=("--out", "out"))
    (path,) = (folder / "out").glob("*-times.json")
    return {each["name"]: each for each in json.loads(path.read_text(encoding="utf-8"))["operations"]}, done


def test_kernels_that_nobody_knows_are_counted(emulate, tmp_path: Path) -> None:
    """What one computes is not known, but its tensor is, which the L2 cache holds."""
    found, done = operations(emulate, tmp_path, OF_THE_PROGRAM)
    unknown = {name: each["calls"] for name, each in found.items() if each["is_unknown"]}
    assert unknown == {"double": 1, "late::triple": 1}
    expected = memory(H100, "elementwise", 1 << 22, held_share=1.0)
    assert found["double"]["time_s"] == pytest.approx(expected, rel=1e-3)
    assert "2 are unknown" in done.stderr


def test_kernels_of_torch_compile_take_the_time_of_their_bytes(emulate, tmp_path: Path) -> None:
    """One kernel in place of three reads half a GiB and writes as much. A profiler hears of it and of nothing
    that a GPU would not have, and none of its tensors is held."""
    found, done = operations(emulate, tmp_path, COMPILED)
    (name,) = (name for name in found if name.startswith("triton_"))
    expected = memory(H100, "elementwise", 2 << 29)
    assert found[name]["time_s"] == pytest.approx(expected, rel=0.02)
    assert not found[name]["is_unknown"]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert not [row for row in rows if row.startswith("harness::")]
    assert rows[name] == pytest.approx(expected * 1e6, rel=0.02)
    assert 1 << 29 <= rows["held"] < (1 << 29) + (1 << 20)  # of all that is large, `x`


@pytest.mark.parametrize(("document", "compiled"), [(4096, False), (300, False), (300, True)])
def test_flex_attention_takes_the_time_of_the_blocks_that_its_mask_leaves(
    emulate, tmp_path: Path, document: int, compiled: bool
) -> None:
    """A causal sequence, whose time is that of FlashAttention 2 at the share that its authors report; and
    documents of 300 tokens, whose blocks are counted on the CPU, whether or not a compiled function makes
    the mask."""
    code = FLEX.replace("DOCUMENT", str(document)).replace("COMPILED", str(compiled))
    found, done = operations(emulate, tmp_path, code)
    a_row = int(done.stdout.splitlines()[-1]) / 32
    seen = round(128 * (2 * a_row - 1))
    assert seen == 4096 if document == 4096 else seen < 800
    for name, direction in (
        ("tem_fused_flex_attention_0", "forward"),
        ("tem_fused_flex_attention_backward", "backward"),
    ):
        (each,) = (row for key, row in found.items() if name in key)
        batch = 2 * 4096 / seen
        flash = attention(H100, "flash2", direction, batch, 8, seen, seen, 128, causal=True)
        assert each["class"] == "attention"
        assert each["time_s"] == pytest.approx(flash / FLEX_RATES[direction], rel=0.02)


@pytest.mark.parametrize("packing", [False, True])
def test_a_run_with_flex_attention_has_the_simulated_flops(tmp_path: Path, packing: bool) -> None:
    """They are counted without the compiler, and so without making scores, in a step that the report of the
    run is not of. Packed documents are those that were drawn, and in the simulation of the mean length."""
    fields = {"attention": "flex_attention", "packing": packing, "data": "synthetic", "seq_len": 4096}
    words = [f"{name}={str(value).lower()}" for name, value in fields.items()]
    command = [
        sys.executable,
        "-m",
        "harness",
        "run",
        "smoke",
        *words,
        "--gpu",
        "h100",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
    assert re.search(r"By kind of kernel: .*attention", done.stderr)
    ran = StepProfile.model_validate_json((tmp_path / "profile.json").read_bytes())
    _, recipe = load_recipe("smoke", words)
    simulated, _ = simulate(recipe, H100, explain_oom=False)
    for name in ("forward", "backward"):
        theirs, ours = ran.phases[name].flops, simulated.phases[name].flops
        assert theirs == (pytest.approx(ours, rel=0.1) if packing else ours)


def test_transforms_decompositions_and_sparse_products_run(emulate) -> None:
    """What follows from the host's data is as PyTorch's CPU has it; what kernels would compute has the CPU's
    shapes, and gradients."""
    result, work_space = (
        1024 * 513 * 8,
        1024 * 1024 * 8,
    )  # NVIDIA: a complex number for each element, at the least
    done = emulate(sys.executable, str(Path(__file__).parent / "programs" / "mathematics.py"))
    assert int(done.stdout) == result + work_space
    told = r"work spaces of cuFFT \(\d+ plans, .*\), cuSOLVER \(\d+ calls, .*\), cuSPARSE \(\d+ calls, "
    assert re.search(told, done.stderr)


def test_work_spaces_of_unknown_size_are_counted(emulate) -> None:
    """PyTorch asks for one a matrix product, and for none with cuBLAS."""
    code = """
import torch
x, csr = torch.eye(8).cuda(), torch.eye(8).to_sparse_csr().cuda()
if "CALLS" == "sparse":
    csr @ x, csr @ x, csr @ x
x @ x
"""
    done = emulate(code=code.replace("CALLS", "sparse"))
    assert done.stderr.endswith("the work spaces of cuSPARSE (3 calls, with none).\n")
    assert "work space" not in emulate(code=code).stderr


def test_a_library_that_nobody_replaces_is_named(emulate) -> None:
    code = """
import torch
x = torch.tensor([0, 0, 1, 1]).tile(128, 32).half().cuda()
for _ in range(2):
    try:
        torch.sparse.to_sparse_semi_structured(x)
    except RuntimeError:
        print("PyTorch said so")
"""
    done = emulate(code=code)
    assert done.stdout == "PyTorch said so\n" * 2
    assert done.stderr.count("here: libcusparseLt.so cannot be replaced") == 1


def test_a_mask_that_the_cpu_cannot_make_is_none_of_the_programs_errors(emulate, tmp_path: Path) -> None:
    """Its function looks at a tensor of the device that it does not close over."""
    code = """
import torch
from torch.nn.attention.flex_attention import create_block_mask
documents = (torch.arange(512) // 100).cuda()
def sees(batch, head, query, key):
    return (query >= key) & (documents[query] == documents[key])
made = torch.compile(create_block_mask)(sees, None, None, 512, 512, device="cuda")
print(tuple(made.kv_num_blocks.shape))
"""
    (tmp_path / "program.py").write_text(code, encoding="utf-8")
    done = emulate(sys.executable, "program.py")
    assert done.stdout == "(1, 1, 4)\n"
    assert "the CPU refuses create_block_mask of the values here" in done.stderr
