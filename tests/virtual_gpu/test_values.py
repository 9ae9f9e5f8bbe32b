"""Values on the virtual GPU: what came from the host, and what follows from it in integers and booleans.

The oracle is PyTorch's CPU: the same function, of the same host data, on either device.
"""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.virtual_gpu
PROGRAMS = Path(__file__).resolve().parent / "programs"

DATA = """
import torch, random
ids = torch.tensor([[5, 3, 9, -100, -100, -100], [7, -100, 2, 2, 8, 1]])
mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
position = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 3])
"""
FUNCTIONS = {
    "label mask": "ids.ne(-100)",
    "token count": "(ids != -100).sum()",
    "counts by row": "(ids != -100).sum(-1)",
    "position ids": "mask.cumsum(-1) - 1",
    "clamped": "ids.clamp(min=0)",
    "shifted": "torch.nn.functional.pad(ids, (0, 1), value=-100)[..., 1:]",
    "document starts": "(position == 0).nonzero()",
    "document lengths": "(position == 0).nonzero().view(-1).diff(append=position.max().view(1) + 6)",
    "boolean indexing": "ids[ids != -100]",
    "boolean indexing in place": "torch.where(ids < 0, 0, ids).masked_fill_(mask == 0, 4)",
    "unique": "torch.unique(ids, return_inverse=True, return_counts=True)",
    "consecutive": "torch.unique_consecutive(ids)",
    "repeat": "mask.view(-1)[:4].repeat_interleave(torch.tensor([1, 0, 3, 2], device=ids.device))",
    "bincount": "ids[ids > 0].bincount(minlength=12)",
    "one hot": "torch.nn.functional.one_hot(ids.clamp(0, 9), 10)",
    "sorted": "ids.sort(-1)",
    "gathered": "ids.gather(1, position[:2].view(2, 1).expand(2, 3))",
    "scattered": "torch.zeros(2, 6, dtype=torch.long, device=ids.device).scatter_(1, mask, ids)",
    "triangle": "torch.triu(torch.ones(5, 5, dtype=torch.bool, device=ids.device), 1)",
    "arithmetic": "((ids * 3 + 1) // 2 % 5) ** 1 - -ids",
    "largest": "(ids.max(), ids.argmax(-1), ids.amin(0))",
    "floats of the host": "(mask.float() * 0.5).sum(-1)",
    "inverted mask": "(1.0 - mask.float()).to(torch.bool)",
    "logic": "(ids > 2) & ~(mask.bool()) | (ids == 9)",
    "index put": "ids.clone().index_put_((mask == 0,), torch.tensor(6, device=ids.device))",
    "searched": "torch.searchsorted(torch.tensor([0, 3, 6], device=ids.device), position)",
    "floats in place": "(mask.float() * 4).sqrt_().sub_(1)",
    "integers in place": "mask.clone().bitwise_left_shift_(position[:6])",
    "equal entries of a sparse tensor": "(lambda s: (s.indices(), s.values()))("
    "torch.sparse_coo_tensor(mask, position[:6], (2, 2)).coalesce())",
    "any and all": "((ids > 0).any(-1), (ids > 0).all(-1))",
}
MANY = """
import contextlib
from torch.utils._python_dispatch import TorchDispatchMode

def plain(value):
    if isinstance(value, (tuple, list)):
        return [plain(each) for each in value]
    return value.cpu().tolist(), str(value.dtype)

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))

for name, text in FUNCTIONS.items():
    function = eval("lambda ids, mask, position: " + text)
    expected = plain(function(ids, mask, position))
    for mode in (contextlib.nullcontext(), Mode()):
        with mode:
            found = plain(function(ids.cuda(), mask.cuda(), position.cuda()))
        assert found == expected, (name, mode, found, expected)
print(len(FUNCTIONS))
"""


def test_integers_are_true(emulate) -> None:
    """Within a dispatch mode too, as those that count FLOPs."""
    done = emulate(code=f"{DATA}\nFUNCTIONS = {FUNCTIONS!r}\n{MANY}")
    assert done.stdout.split() == [str(len(FUNCTIONS))]
    assert "virtual GPU:" not in done.stderr


REFUSED_BY_CUDA = """
    __rmatmul__ addbmm addmm addmv baddbmm bmm dot einsum inner linalg.multi_dot matmul mm mv tensordot vdot
    nn.functional.bilinear nn.functional.linear nn.functional.conv1d nn.functional.conv2d
    nn.functional.conv3d nn.functional.conv_transpose1d nn.functional.conv_transpose2d
    nn.functional.conv_transpose3d nn.functional.avg_pool1d nn.functional.avg_pool2d nn.functional.avg_pool3d
    nn.functional.max_pool2d nn.functional.max_pool3d nn.functional.local_response_norm
    nn.functional.interpolate nn.functional.upsample_bilinear _upsample_bilinear2d_aa native_dropout_backward
    scatter_reduce tensor_split mode
"""
"""Of some integers, in PyTorch's own words, as "not implemented for 'Long'"; but for `mode`, which reads on
the host what a kernel of Thrust would have found."""


def test_every_operator_given_integers_is_right_or_said_to_be_unknown(emulate) -> None:
    """PyTorch's own list of operators and their arguments, with the lists of tensors that optimizers use."""
    done = emulate(sys.executable, str(PROGRAMS / "operators.py"))
    *wrong, left_out, counts = done.stdout.splitlines()
    compared, unknown, _, by_the_cpu, by_cuda = map(int, counts.split())
    assert not wrong
    assert compared > 1500
    assert unknown < compared / 50, done.stderr
    assert by_the_cpu < 2500
    assert by_cuda < 1300
    others = {name for name in left_out.removeprefix("left out: ").split(", ") if not name.startswith("fft.")}
    assert others <= {*REFUSED_BY_CUDA.split()}, done.stderr


VALUES = {
    "equal": ("torch.equal(a, b)", False),
    "allclose": ("torch.allclose(a, b)", False),
    "isclose": ("torch.isclose(a, b).tolist()", [False, True, False]),
    "a power": ("(a ** b).tolist()", [1, 4, 9]),
    "a mask by vmap": (
        "torch.vmap(lambda q: torch.vmap(lambda k: q >= k)(a))(b).int().tolist()",
        [[0, 0, 0], [1, 1, 0], [1, 1, 0]],
    ),
    "a list in place": ("(torch._foreach_add_([a], 1), a.tolist())[1]", [2, 3, 4]),
    "a side that is not taken": (
        "torch.where(a < 0, torch.rand(3).cuda().normal_(), b).tolist()",
        [0.0, 2.0, 2.0],
    ),
    "zeroed": ("(torch._foreach_zero_([a]), a.tolist())[1]", [0, 0, 0]),
    "a sum of too many": ("(torch.ones(1 << 24, dtype=torch.long).cuda() == 1).sum().item()", 0),
    "all of too many": ("(torch.ones(1 << 24, dtype=torch.long).cuda() == 3).all().item()", True),
}


def test_what_programs_decide_by(emulate) -> None:
    """Known, but for tensors that are too large to keep: nobody knows what they give, and that is said."""
    code = f"""
    import torch, virtual_gpu_said
    for name, (text, expected) in {VALUES!r}.items():
        a, b = torch.tensor([1, 2, 3]).cuda(), torch.tensor([0, 2, 2]).cuda()
        virtual_gpu_said.said.clear()
        found = eval(text)
        assert found == expected, (name, found)
        assert ("read" in virtual_gpu_said.said) == ("too many" in name), name
    """
    emulate(code=code)


def test_floats_of_kernels_are_zeros_and_that_is_said_once(emulate) -> None:
    code = """
    import torch
    product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    print(product.sum().item(), torch.isfinite(product).all().item(), torch.isnan(product).any().item())
    print(product[0, 0].item())
    """
    done = emulate(code=code)
    assert done.stdout.splitlines() == ["0.0 True False", "0.0"]
    assert done.stderr.count("reads a value that no kernel computed") == 1


@pytest.mark.parametrize(
    ("tokens", "labels", "said"),
    [
        ("[[1, 2, 9]]", "[6, -100, 0]", None),
        ("[[1, 2, 10]]", "[6, -100, 0]", "index_select is given an index of 10, and there are 10, from 0 on"),
        ("[[1, 2, 9]]", "[7, -100, 0]", "nll_loss_forward is given a label of 7, and there are 7, from 0 on"),
    ],
)
def test_an_index_past_the_end_is_said(emulate, tokens, labels, said) -> None:
    """More words than the embedding has, a label past the classes: the kernels of PyTorch assert it."""
    code = f"""
import torch
with torch.device("cuda"):
    embedding, head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 7)
    tokens, labels = torch.tensor({tokens}), torch.tensor({labels})
torch.nn.functional.cross_entropy(head(embedding(tokens)).view(-1, 7), labels).backward()
"""
    printed = emulate(code=code).stderr
    assert ("device-side assert" in printed) == (said is not None)
    assert (said or "") in printed


def test_what_the_cpu_refuses_is_said_once(emulate) -> None:
    code = """
    import torch
    rows, beyond = torch.arange(3).cuda(), torch.tensor([5]).cuda()
    for _ in range(2):
        print(rows[beyond].shape)
    """
    done = emulate(code=code)
    assert done.stdout.splitlines() == ["torch.Size([1])"] * 2
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("virtual GPU:")]
    assert "the CPU refuses index of the values here (index 5 is out of bounds" in said


@pytest.mark.parametrize("operator", ["index_fill_(0, beyond, 7)", "float().normal_()"])
def test_nobody_knows_what_an_operator_wrote_that_is_not_computed(emulate, operator: str) -> None:
    """What was there before is not true any more: it reads as 0, and that is said."""
    code = f"""
    import torch
    ours, beyond = torch.arange(1, 4).cuda(), torch.tensor([5]).cuda()
    written = ours.{operator}
    print(written[0].item())
    """
    done = emulate(code=code)
    assert "reads a value that no kernel computed" in done.stderr
    assert float(done.stdout) == 0


@pytest.mark.parametrize(
    "change",
    ["u[0] = 5", "u[:2].zero_()", "u[:2].copy_(u.new_ones(2))", "torch.add(u.new_ones(2), 1, out=u[:2])"],
)
@pytest.mark.parametrize(
    "unknown",
    [
        "torch.ones((1 << 23) + 1, dtype=torch.long).cuda()[:4].clone()",  # of what is too large to keep
        "torch.ones(4, 2, device='cuda') @ torch.ones(2, device='cuda')",
    ],
    ids=["integers", "floats"],
)
def test_a_part_that_is_known_makes_nothing_known_of_the_rest(emulate, change: str, unknown: str) -> None:
    """What is written over as a whole is known again."""
    code = f"""
    import torch
    u = {unknown}
    {change}
    print(int(u[3].item()))
    u.copy_(torch.arange(4))
    u[3] += 1
    print(u.int().tolist())
    """
    done = emulate(code=code)
    assert done.stdout == "0\n[0, 1, 2, 4]\n"
    assert done.stderr.count("reads a value that no kernel computed: it is 0") == 1


@pytest.mark.parametrize(
    ("routing", "expected"), [("balanced", [16] * 8), ("worst", [64, 64, 0, 0, 0, 0, 0, 0])]
)
def test_a_router_is_balanced_unless_asked(emulate, routing: str, expected: list[int]) -> None:
    code = """
    import torch
    router = torch.nn.Linear(32, 8).cuda()
    chosen = router(torch.randn(64, 32, device="cuda")).softmax(-1).topk(2).indices
    print(chosen.view(-1).bincount(minlength=8).tolist())
    """
    done = emulate(code=code, options=("--routing", routing))
    assert done.stdout.strip() == str(expected)


def test_the_scaler_finds_no_infinity(emulate) -> None:
    code = """
    import torch
    model = torch.nn.Linear(8, 8).cuda()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cuda")
    for _ in range(3):
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.ones(2, 8, device="cuda")).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(scaler.get_scale())
    """
    assert emulate(code=code).stdout.strip() == "65536.0"


def test_large_host_data_costs_no_memory_of_the_host(emulate) -> None:
    code = """
    import resource, torch
    torch.ones(1, device="cuda")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights = [torch.empty(1 << 30, dtype=torch.uint8).cuda() for _ in range(8)]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(grown < 100 << 10, torch.cuda.memory_allocated() >> 30)
    """
    assert emulate(code=code).stdout.split() == ["True", "8"]


def test_the_masks_of_dropout_cost_no_memory_of_the_host(emulate) -> None:
    """Eight of 8 MiB, which would be written out as zeros: in a LoRA with dropout each layer has one."""
    code = """
import torch
resident = lambda: int(open("/proc/self/statm").read().split()[1]) << 12
x = torch.randn(2048, 4096, device="cuda", requires_grad=True)
torch.native_dropout(x, 0.1, True)
before = resident()
kept = [torch.native_dropout(x, 0.1, True) for _ in range(8)]
print(resident() - before, kept[0][1].sum().item())
"""
    grown, ones = emulate(code=code).stdout.split()
    assert int(grown) < 8 << 20
    assert ones == "0"


def test_floats_leave_room_for_integers(emulate) -> None:
    """Adapters and their optimizer's state are small floats, many of them."""
    code = """
    import torch
    weights = [torch.ones(1 << 18).cuda() for _ in range(300)]
    print(torch.arange(5, device="cuda").diff().tolist())
    """
    assert emulate(code=code).stdout.strip() == "[1, 1, 1, 1]"


def test_backward_has_the_sizes_of_forward(emulate) -> None:
    """Boolean indexing and checkpointing within the autograd engine, where Python sees nothing."""
    code = """
    import torch
    from torch.utils.checkpoint import checkpoint
    x = torch.randn(6, 4, device="cuda", requires_grad=True)
    keep = torch.tensor([True, False, True, True, False, False]).cuda()
    checkpoint(lambda x: x[keep] * 2, x, use_reentrant=False).sum().backward()
    checkpoint(lambda x: x[keep] * 2, x, use_reentrant=True).sum().backward()
    x[keep].exp().sum().backward()
    print(x.grad.shape)
    """
    assert emulate(code=code).stdout.strip() == "torch.Size([6, 4])"


def test_operators_of_functions(emulate) -> None:
    """flex_attention, cond, while_loop: they meet the keys that values are kept with, and pass them."""
    code = """
    import torch
    from torch._higher_order_ops.while_loop import while_loop
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    x = torch.arange(6).view(3, 2).cuda()
    print(torch.cond(x.sum() > 3, lambda x: x + 1, lambda x: x - 1, (x,)).tolist())
    print(while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (x[0, 0], x[0]))[1].tolist())
    q = torch.randn(1, 2, 256, 64, device="cuda", requires_grad=True)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256)
    flex_attention(q, q, q, block_mask=mask).sum().backward()
    print(mask.kv_num_blocks.tolist(), list(q.grad.shape))
    """
    said = emulate(code=code).stdout.splitlines()
    assert said == ["[[1, 2], [3, 4], [5, 6]]", "[0, 8]", "[[[1, 1]]] [1, 2, 256, 64]"]


def test_a_compiled_loop_ends(emulate) -> None:
    """Its condition is a value that no kernel computed: what another tensor left in memory had it go on
    without an end. And nothing of the virtual GPU is compiled, of which Dynamo would warn."""
    code = """
    import torch
    from torch._higher_order_ops import while_loop
    left = torch.ones((), dtype=torch.bool, device="cuda")
    del left
    there = torch.empty((), dtype=torch.bool, device="cuda")
    assert (there.item(), there.cpu().item()) == (False, False)
    del there
    @torch.compile
    def double(i, x):
        return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x * 2), (i, x))
    assert double(torch.tensor(0, device="cuda"), torch.tensor(1, device="cuda"))[1].shape == ()
    """
    said = emulate(code=code).stderr
    assert "reads a value that no kernel computed" in said
    assert "Dynamo does not know" not in said


def test_a_search_by_beams_goes_on_as_on_the_cpu(emulate) -> None:
    """Until the length it is given: no end-of-text token is among the first that score best."""
    code = """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=100, eos_token_id=None))
    ids = torch.ones(2, 3, dtype=torch.int64)
    limits = dict(num_beams=4, max_new_tokens=9, pad_token_id=0)
    for how in ({}, {"do_sample": True}):
        found = [
            model.to(device).generate(ids.to(device), **limits, **how).shape for device in ("cpu", "cuda")
        ]
        assert found == [(2, 12)] * 2, (how, found)
    """
    emulate(code=code)


def test_the_clock_leaves_out_what_following_values_takes(emulate) -> None:
    """Each operator tells of it, and the clock is set back by it: here by a quarter of an hour."""
    code = """
import ctypes, sys, torch
torch.cuda.Event(enable_timing=True).record()  # the clock starts
own = sys.modules["virtual_gpu_own_time"]
now = ctypes.CDLL(None).virtual_gpu_now
now.restype = ctypes.c_int64
numbers = torch.ones(3, device="cuda")
passed = own.following_ns.value
numbers.neg_()
print(1000 < own.following_ns.value - passed < 10**9)
quarter = 900 * 10**9
before = now()
with torch.profiler.profile():  # meanwhile the host's clock counts as it is
    own.not_the_programs(quarter)
    print(0 < now() - before < quarter)
print(0 < now() - before < quarter)
before = now()
own.not_the_programs(quarter)
print(abs(now() - before + quarter) < 10**11)
"""
    assert emulate(code=code).stdout.split() == ["True"] * 4


def test_weights_that_the_device_quantizes_leave_room_for_what_the_host_sends(emulate) -> None:
    """Of a quantized weight nobody reads values. An object that was pickled for another rank is 8-bit
    integers, too, and comes from the host."""
    code = """
import torch
weights = []
for _ in range(80):
    packed = (torch.randn(1 << 22, device="cuda") > 0).to(torch.uint8)
    weights.append(packed[::2] << 4 | packed[1::2])
ids = torch.arange(6000)
assert (ids.cuda() == ids.cuda()).sum().item() == 6000
sent = torch.arange(1 << 22).to(torch.uint8)
assert torch.equal(sent.cuda().cpu(), sent)
mask = ids.cuda()[:, None] >= ids.cuda()[None, :]
assert mask.sum(-1, dtype=torch.int8).shape == (6000,)
assert mask.sum().item() == 6000 * 6001 // 2
print("known")
"""
    assert emulate(sys.executable, "-c", code).stdout == "known\n"
