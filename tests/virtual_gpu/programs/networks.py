"""Networks that are no transformers: of images, with batch normalization; recurrent ones; in CUDA graphs.

usage: networks.py convolutions | recurrent | sampler | graph | compiled
"""

import sys

import pytest
import torch
from torch import nn


def held(make):
    """What `make` returns, and the bytes that are allocated more as it is done."""
    before = torch.cuda.memory_allocated()
    made = make()
    return made, torch.cuda.memory_allocated() - before


def gradient(tensor):
    assert tensor.grad is not None
    return tensor.grad


def convolutions():
    images = torch.randn(16, 3, 64, 64, pin_memory=True)
    normalize = nn.BatchNorm2d(3).cuda()
    for form in (torch.contiguous_format, torch.channels_last):
        x = images.cuda(non_blocking=True).to(memory_format=form)
        y, more = held(lambda x=x: normalize(x))
        assert type(y.grad_fn).__name__ == "CudnnBatchNormBackward0"
        assert more == 4 * y.numel() + 2 * 512, more  # mean and deviation of 3 channels
        y.sum().backward()
        del y
    layers = [nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, 2)]
    layers += [nn.BatchNorm2d(64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    model = nn.Sequential(*layers).cuda().to(memory_format=torch.channels_last)
    optimizer, scaler = torch.optim.SGD(model.parameters(), momentum=0.9), torch.amp.GradScaler("cuda")
    for _ in range(2):
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(x), torch.arange(16, device="cuda") % 10)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    model.eval()
    assert model(x).shape == (16, 10)


def recurrent():
    for dtype in (torch.float32, torch.float16):
        for kind in (nn.LSTM, nn.GRU, nn.RNN):
            for options in ({}, {"dropout": 0.1, "bidirectional": True, "num_layers": 2}):
                model = kind(128, 256, **options).cuda().to(dtype)
                x = torch.randn(32, 16, 128, device="cuda", dtype=dtype, requires_grad=True)
                (y, _), more = held(lambda model=model, x=x: model(x))
                assert y.shape == (32, 16, 512 if options else 256)
                # backward needs the gates of each step, as many as the weights are blocks
                gates = model.weight_hh_l0.shape[0] if kind is not nn.RNN else 0
                assert more > y.nbytes + 32 * 16 * gates * y.element_size(), more
                y.sum().backward()
                assert all(gradient(t).shape == t.shape for t in (x, *model.parameters()))


def sampler():
    x = torch.randn(2, 4, 16, 16, device="cuda", requires_grad=True)
    turn = torch.randn(2, 2, 3, device="cuda", requires_grad=True)
    grid = nn.functional.affine_grid(turn, [2, 4, 16, 16], align_corners=True)
    nn.functional.grid_sample(x, grid, align_corners=True).sum().backward()
    assert all(gradient(t).shape == t.shape for t in (x, turn))


def graph():
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    x, side, beside = torch.randn(64, 1024, device="cuda"), torch.cuda.Stream(), torch.cuda.Stream()

    def step():
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        optimizer.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    captured, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    with torch.cuda.graph(captured, pool=pool):
        loss = step()
        assert torch.cuda.is_current_stream_capturing()
        main = torch.cuda.current_stream()
        with torch.cuda.stream(beside):
            assert not torch.cuda.is_current_stream_capturing()
            beside.wait_stream(main)  # now it takes part
            assert torch.cuda.is_current_stream_capturing()
            aside = torch.ones(2**20, device="cuda")
        main.wait_stream(beside)
    with torch.cuda.stream(beside):
        assert not torch.cuda.is_current_stream_capturing()
    state = held(lambda: [captured.replay() for _ in range(3)])
    assert state[1] == 0
    segments = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == tuple(pool)]
    inside = {
        block["address"] for s in segments for block in s["blocks"] if block["state"].startswith("active")
    }
    gradients = [gradient(p).data_ptr() for p in model.parameters()]
    assert {loss.data_ptr(), aside.data_ptr(), *gradients} <= inside
    assert x.data_ptr() not in inside
    refused = pytest.raises(torch.AcceleratorError, match="operation not permitted when stream is capturing")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.cuda.current_stream().synchronize()


def compiled():
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
    step = torch.compile(model, backend="cudagraphs")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        step(torch.randn(64, 256, device="cuda")).sum().backward()
        model.zero_grad()  # the next replay writes where they are
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(0, create_if_none_exists=False)
    assert manager is not None
    assert manager.new_graph_id().id >= 2  # forward's and backward's


globals()[sys.argv[1]]()
print("done: peak", torch.cuda.max_memory_allocated())
