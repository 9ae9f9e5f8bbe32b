"""What cuFFT, cuSOLVER and cuSPARSE of the virtual GPU are called for, and the bytes of a transform."""

import warnings

import torch
from torch import fft, linalg, sparse

warnings.simplefilter("ignore")
torch.manual_seed(0)
square = torch.randn(3, 12, 12)
positive = square @ square.mT + torch.eye(12)
row = torch.relu(square[0])


def stft(x):
    window = torch.ones(16, device=x.device)
    return torch.stft(x.flatten(1), 16, window=window, return_complex=True)


TRANSFORMS = "fft ifft rfft hfft fft2 rfft2 fftn irfftn"
OF_ANY = "qr svd svdvals eigvals inv det slogdet pinv lu lu_factor"
OF_POSITIVE = "eigh eigvalsh cholesky ldl_factor matrix_rank cond"
called = {
    **{name: (getattr(fft, name), square) for name in TRANSFORMS.split()},
    "stft": (stft, square),
    **{name: (getattr(linalg, name), square) for name in OF_ANY.split()},
    **{name: (getattr(linalg, name), positive) for name in OF_POSITIVE.split()},
    "eig": (linalg.eig, square[0]),
    "svd of one": (linalg.svd, square[0]),
    "eigh of one": (linalg.eigh, positive[0]),
    "solve": (lambda x: linalg.solve(x, x), positive),
    "lstsq": (lambda x: linalg.lstsq(x, x).solution, square),
    "cholesky_inverse": (torch.cholesky_inverse, positive),
    "orthogonal_": (lambda x: torch.nn.init.orthogonal_(x.clone()), square[0]),
    "svd_lowrank": (lambda x: torch.svd_lowrank(x, 4), square[0]),
    "coo @ dense": (lambda x: sparse.mm(row.to_sparse().to(x.device), x), square[0]),
    "csr @ dense": (lambda x: row.to_sparse_csr().to(x.device) @ x, square[0]),
    "csr @ vector": (lambda x: row.to_sparse_csr().to(x.device) @ x[0], square[0]),
    "bsr @ dense": (lambda x: row.to_sparse_bsr((4, 4)).to(x.device) @ x, square[0]),
}


def shapes(made):
    made = made if isinstance(made, tuple) else (made,)
    return [(tuple(each.shape), each.dtype) for each in made]


for name, (function, given) in called.items():
    on_device = function(given.cuda() * torch.rand(1, device="cuda"))
    assert shapes(on_device) == shapes(function(given)), name
for name in ("fft", "rfft2", "svdvals", "cholesky", "solve"):
    function, given = called[name]
    torch.testing.assert_close(function(given.cuda()).cpu(), function(given), rtol=1e-4, atol=1e-4)

weight = torch.nn.Parameter(torch.randn(8, 8, device="cuda"))
(linalg.svdvals(weight).sum() + fft.rfft(weight).abs().sum() + linalg.qr(weight).R.sum()).backward()
assert weight.grad.shape == weight.shape

signal = torch.empty(1024, 1024, device="cuda")
before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
fft.rfft(signal)
print(torch.cuda.max_memory_allocated() - before)
