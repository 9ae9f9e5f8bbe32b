"""The devices of the hardware table by the names their driver gives them. Imports no torch."""

from __future__ import annotations

from typing import Any, NamedTuple

TABLE_NAMES = {
    "NVIDIA B200": "b200",
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA L40S": "l40s",
    "NVIDIA L4": "l4",
    "NVIDIA A10G": "a10g",
    "NVIDIA A40": "a40",
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB": "v100-16gb",
    "Tesla V100-SXM2-32GB": "v100-32gb",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "NVIDIA GeForce RTX 3080": "rtx-3080",
    "NVIDIA GeForce RTX 3070": "rtx-3070",
    "NVIDIA GeForce RTX 3060": "rtx-3060",
    "NVIDIA GeForce RTX 4060 Ti": "rtx-4060-ti-16gb",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "rtx-4070-ti-super",
    "NVIDIA GeForce RTX 4080": "rtx-4080",
    "NVIDIA GeForce RTX 5060 Ti": "rtx-5060-ti-16gb",
    "NVIDIA GeForce RTX 5070 Ti": "rtx-5070-ti",
    "NVIDIA GeForce RTX 5080": "rtx-5080",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000",
    "NVIDIA RTX A6000": "rtx-a6000",
    "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
}
"""What the driver calls a device of the hardware table. No other name has ceilings, and so no MFU."""

MIB = 2**20


class Cited(NamedTuple):
    """A number and where it was read."""

    value: float
    source: str


class Datasheet(NamedTuple):
    """One device. `flops` maps a dtype (fp32, bf16, fp16) to dense FLOP/s; a dtype it lacks is absent."""

    name: str
    title: str
    compute_capability: str
    memory_bytes: Cited
    memory_bandwidth: Cited
    flops: dict[str, Cited]
    host_link: Cited
    gpu_link: Cited
    """To another GPU of the same machine: half of the bidirectional NVLink figure, else the host link."""


def _pcie(generation: int, lanes: int = 16) -> Cited:
    # lanes of 8, 16 or 32 GT/s, 128 of every 130 bits are data.
    rate = {3: 8e9, 4: 16e9, 5: 32e9}[generation]
    source = f"PCI Express Base Specification, generation {generation}, {lanes} lanes"
    return Cited(rate * lanes * 128 / 130 / 8, source)


def _nvlink(bidirectional: float, source: str) -> Cited:
    return Cited(bidirectional / 2, f"half of {bidirectional / 1e9:g} GB/s bidirectional: {source}")


def _seen_by_cuda(name: str, nvidia_smi_mib: int) -> Cited:
    total = f"nvidia-smi, memory total: {nvidia_smi_mib} MiB ({_TOTALS})"
    if name not in _CAPACITIES:
        return Cited(nvidia_smi_mib * MIB - _KEPT_BY_DRIVER, f"{total}, less what the driver keeps of others")
    gib, source = _CAPACITIES[name]
    return Cited(round(gib * 1024) * MIB, f"PyTorch's out-of-memory message: {gib} GiB ({source}); {total}")


def _gpu(
    name: str,
    title: str,
    compute_capability: str,
    mib: int,
    bandwidth: float,
    fp32: float,
    half: float,
    source: str,
    *,
    pcie: int,
    lanes: int = 16,
    nvlink: float | None = None,
    bf16: bool = True,
) -> Datasheet:
    dtypes = {"fp32": fp32, "fp16": half} | ({"bf16": half} if bf16 else {})
    return Datasheet(
        name,
        title,
        compute_capability,
        memory_bytes=_seen_by_cuda(name, mib),
        memory_bandwidth=Cited(bandwidth, source),
        flops={dtype: Cited(value, source) for dtype, value in dtypes.items()},
        host_link=_pcie(pcie, lanes),
        gpu_link=_nvlink(nvlink, source) if nvlink else _pcie(pcie, lanes),
    )


_CAPACITIES = {
    "h100": (79.11, "github.com/vllm-project/vllm/issues/27508"),
    "h100-nvl": (93.0, "github.com/ali-vilab/VACE/issues/56"),
    "a100-80gb": (79.25, "github.com/HiDream-ai/VAREdit/issues/6"),
    "a100-40gb": (39.5, "github.com/TianheWu/CoSeR/issues/10"),
    "l40s": (44.42, "github.com/stepfun-ai/Step-Video-T2V/issues/8"),
    "l4": (22.03, "github.com/ArcInstitute/evo2/issues/190"),
    "t4": (14.56, "github.com/Zheng-Chong/CatVTON/issues/133"),
    "v100-16gb": (15.78, "github.com/kchengiva/Shift-GCN/issues/34"),
    "v100-32gb": (31.75, "github.com/google/dynibar/issues/8"),
    "rtx-3090": (23.56, "github.com/noonghunna/club-3090/issues/58"),
    "rtx-4090": (23.64, "github.com/3DTopia/Phidias-Diffusion/issues/8"),
    "rtx-5090": (31.36, "github.com/TrajectoryCrafter/TrajectoryCrafter/issues/20"),
    "rtx-3080": (9.78, "github.com/zai-org/CogVideo/issues/34"),
    "rtx-3070": (7.78, "github.com/akshitac8/OW-DETR/issues/46"),
    "rtx-3060": (11.76, "github.com/TencentARC/PhotoMaker/issues/47"),
    "rtx-5060-ti-16gb": (15.445, "15,816 MiB CUDA-visible: github.com/Luce-Org/lucebox/issues/407"),
    "rtx-5070-ti": (15.47, "of a card of 16303 MiB: VRAMancer's benchmark of its lending pool"),
    "rtx-5080": (15.47, "of a card of 16303 MiB: VRAMancer's benchmark of its lending pool"),
    "rtx-pro-6000": (94.97, "github.com/antirez/ds4/issues/431"),
}
"""GiB that PyTorch names as a GPU's total capacity. It varies by a few tenths with the driver."""
_KEPT_BY_DRIVER = MIB * 1024 // 2
"""nvidia-smi's totals exceed the capacities above by 0.37 (RTX 4090) to 0.75 GiB (A100 80 GB)."""
_TOTALS = "several are listed in github.com/modal-labs/modal-client/pull/2797"
_H200 = "NVIDIA H200 datasheet (989.5 = 1,979 with sparsity / 2)"
_H100 = "NVIDIA H100 datasheet (sparse figures halved)"
_A100 = "NVIDIA A100 datasheet"
_L40S = "NVIDIA L40S datasheet"
_L4 = "NVIDIA L4 datasheet (121 = 242 with sparsity / 2)"
_A10G = "baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference, after NVIDIA's A10G datasheet for AWS"
_T4 = "NVIDIA T4 product brief and datasheet (320 = 256 bit x 10 Gb/s / 8)"
_V100 = "NVIDIA V100 datasheet, SXM2"
_GA102 = "NVIDIA Ampere GA102 whitepaper v2, appendix A (FP16 with FP32 accumulate, dense)"
_GA106 = (
    "NVIDIA's specifications of the GeForce RTX 30 cards; FP16 = 102 TFLOPS with sparsity and FP16 sums / 4"
)
_ADA = "NVIDIA Ada GPU architecture whitepaper v2, appendix A (FP16 with FP32 accumulate, dense)"
_ADA_GEFORCE = "NVIDIA's specifications of the GeForce RTX 40 cards; FP16 = FP8 with sparsity (AI TOPS) / 8"
_GB20X = "NVIDIA's specifications of the GeForce RTX 50 cards; FP16 = FP4 with sparsity (AI TOPS) / 16"
_PRO6000 = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition datasheet (503.8 = 4,030 FP4 with sparsity / 8)"
_GB202 = "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A (FP16 with FP32 accumulate, dense)"
_A40 = "NVIDIA A40 datasheet (149.7 = 299.4 with sparsity / 2)"
_A6000 = "NVIDIA RTX A6000 datasheet and GA102 whitepaper (dense)"
_ADA6000 = "NVIDIA RTX 6000 Ada datasheet (364.2 = 1,457 FP8 with sparsity / 4)"
_B200 = "NVIDIA HGX B200 datasheet, per GPU (2,250 = 4,500 with sparsity / 2)"

_VOLTA: dict[str, Any] = {"pcie": 3, "nvlink": 300e9, "bf16": False}

SM_COUNTS = {
    "b200": 148,
    "h200": 132,
    "h100": 132,
    "h100-nvl": 132,
    "h100-pcie": 114,
    "a100-80gb": 108,
    "a100-40gb": 108,
    "l40s": 142,
    "l4": 58,
    "a10g": 80,
    "a40": 84,
    "t4": 40,
    "v100-16gb": 80,
    "v100-32gb": 80,
    "rtx-3090": 82,
    "rtx-4090": 128,
    "rtx-5090": 170,
    "rtx-a6000": 84,
    "rtx-6000-ada": 142,
    "rtx-3080": 68,
    "rtx-3070": 46,
    "rtx-3060": 28,
    "rtx-4060-ti-16gb": 34,
    "rtx-4070-ti-super": 66,
    "rtx-4080": 76,
    "rtx-5060-ti-16gb": 36,
    "rtx-5070-ti": 70,
    "rtx-5080": 84,
    "rtx-pro-6000": 188,
}
"""Streaming multiprocessors, as CUDA's device properties give them (NVIDIA's architecture whitepapers)."""

L2_BYTES = {
    "b200": 126 * MIB,
    "h200": 50 * MIB,
    "h100": 50 * MIB,
    "h100-nvl": 50 * MIB,
    "h100-pcie": 50 * MIB,
    "a100-80gb": 40 * MIB,
    "a100-40gb": 40 * MIB,
    "l40s": 96 * MIB,
    "l4": 48 * MIB,
    "a10g": 6 * MIB,
    "a40": 6 * MIB,
    "t4": 4 * MIB,
    "v100-16gb": 6 * MIB,
    "v100-32gb": 6 * MIB,
    "rtx-3090": 6 * MIB,
    "rtx-4090": 72 * MIB,
    "rtx-5090": 96 * MIB,
    "rtx-a6000": 6 * MIB,
    "rtx-6000-ada": 96 * MIB,
    "rtx-3080": 5 * MIB,
    "rtx-3070": 4 * MIB,
    "rtx-3060": 3 * MIB,
    "rtx-4060-ti-16gb": 32 * MIB,
    "rtx-4070-ti-super": 48 * MIB,
    "rtx-4080": 64 * MIB,
    "rtx-5060-ti-16gb": 32 * MIB,
    "rtx-5070-ti": 48 * MIB,
    "rtx-5080": 64 * MIB,
    "rtx-pro-6000": 128 * MIB,
}
"""Second-level cache, as CUDA's device properties give it (NVIDIA's architecture whitepapers)."""

DATASHEETS: tuple[Datasheet, ...] = (
    _gpu("b200", "B200 SXM 180 GB", "10.0", 183359, 7.7e12, 75e12, 2250e12, _B200, pcie=5, nvlink=1800e9),
    _gpu("h200", "H200 SXM 141 GB", "9.0", 143771, 4.8e12, 67e12, 989.5e12, _H200, pcie=5, nvlink=900e9),
    _gpu("h100", "H100 SXM 80 GB", "9.0", 81559, 3.35e12, 67e12, 989.5e12, _H100, pcie=5, nvlink=900e9),
    _gpu("h100-nvl", "H100 NVL 94 GB", "9.0", 95830, 3.9e12, 60e12, 835.5e12, _H100, pcie=5, nvlink=600e9),
    _gpu("h100-pcie", "H100 PCIe 80 GB", "9.0", 81559, 2.0e12, 51e12, 756.5e12, _H100, pcie=5, nvlink=600e9),
    _gpu("a100-80gb", "A100 SXM 80 GB", "8.0", 81920, 2.039e12, 19.5e12, 312e12, _A100, pcie=4, nvlink=600e9),
    _gpu("a100-40gb", "A100 SXM 40 GB", "8.0", 40960, 1.555e12, 19.5e12, 312e12, _A100, pcie=4, nvlink=600e9),
    _gpu("l40s", "L40S 48 GB", "8.9", 46068, 864e9, 91.6e12, 362.05e12, _L40S, pcie=4),
    _gpu("l4", "L4 24 GB", "8.9", 23034, 300e9, 30.3e12, 121e12, _L4, pcie=4),
    _gpu("a10g", "A10G 24 GB", "8.6", 23028, 600e9, 35e12, 70e12, _A10G, pcie=4),
    _gpu("a40", "A40 48 GB", "8.6", 46068, 696e9, 37.4e12, 149.7e12, _A40, pcie=4, nvlink=112.5e9),
    _gpu("t4", "T4 16 GB", "7.5", 15360, 320e9, 8.1e12, 65e12, _T4, pcie=3, bf16=False),
    _gpu("v100-16gb", "V100 SXM2 16 GB", "7.0", 16160, 900e9, 15.7e12, 125e12, _V100, **_VOLTA),
    _gpu("v100-32gb", "V100 SXM2 32 GB", "7.0", 32510, 900e9, 15.7e12, 125e12, _V100, **_VOLTA),
    _gpu("rtx-3090", "RTX 3090 24 GB", "8.6", 24576, 936e9, 35.6e12, 71e12, _GA102, pcie=4, nvlink=112.5e9),
    _gpu("rtx-4090", "RTX 4090 24 GB", "8.9", 24564, 1008e9, 82.6e12, 165.2e12, _ADA, pcie=4),
    _gpu("rtx-5090", "RTX 5090 32 GB", "12.0", 32607, 1792e9, 104.8e12, 209.5e12, _GB202, pcie=5),
    _gpu(
        "rtx-a6000", "RTX A6000 48 GB", "8.6", 49140, 768e9, 38.7e12, 154.8e12, _A6000, pcie=4, nvlink=112.5e9
    ),
    _gpu("rtx-6000-ada", "RTX 6000 Ada 48 GB", "8.9", 49140, 960e9, 91.1e12, 364.2e12, _ADA6000, pcie=4),
    _gpu("rtx-3080", "RTX 3080 10 GB", "8.6", 10240, 760e9, 29.8e12, 59.5e12, _GA102, pcie=4),
    _gpu("rtx-3070", "RTX 3070 8 GB", "8.6", 8192, 448e9, 20.3e12, 40.6e12, _GA102, pcie=4),
    _gpu("rtx-3060", "RTX 3060 12 GB", "8.6", 12288, 360e9, 12.7e12, 25.5e12, _GA106, pcie=4),
    _gpu(
        "rtx-4060-ti-16gb",
        "RTX 4060 Ti 16 GB",
        "8.9",
        16380,
        288e9,
        22.06e12,
        44.1e12,
        _ADA_GEFORCE,
        pcie=4,
        lanes=8,
    ),
    _gpu(
        "rtx-4070-ti-super",
        "RTX 4070 Ti SUPER 16 GB",
        "8.9",
        16376,
        672e9,
        44.1e12,
        88.2e12,
        _ADA_GEFORCE,
        pcie=4,
    ),
    _gpu("rtx-4080", "RTX 4080 16 GB", "8.9", 16376, 716.8e9, 48.7e12, 97.5e12, _ADA_GEFORCE, pcie=4),
    _gpu(
        "rtx-5060-ti-16gb",
        "RTX 5060 Ti 16 GB",
        "12.0",
        16311,
        448e9,
        23.7e12,
        47.4e12,
        _GB20X,
        pcie=5,
        lanes=8,
    ),
    _gpu("rtx-5070-ti", "RTX 5070 Ti 16 GB", "12.0", 16303, 896e9, 43.9e12, 87.9e12, _GB20X, pcie=5),
    _gpu("rtx-5080", "RTX 5080 16 GB", "12.0", 16303, 960e9, 56.3e12, 112.6e12, _GB20X, pcie=5),
    _gpu("rtx-pro-6000", "RTX PRO 6000 96 GB", "12.0", 97887, 1792e9, 125.9e12, 503.8e12, _PRO6000, pcie=5),
)

NOT_MODELLED: dict[str, tuple[str, str]] = {
    "mi210": ("64GB", "an MI210 has 64 GB"),
    "mi250x": ("64GB", "an MI250X is two devices of 64 GB each, one for each of its dies"),
    "mi300a": ("128GB", "an MI300A has 128 GB, which its processor shares"),
    "mi300x": ("192GB", "an MI300X has 192 GB"),
    "mi325x": ("256GB", "an MI325X has 256 GB"),
    "mi355x": ("288GB", "an MI355X has 288 GB"),
    "rx-7900-xt": ("20GB", "an RX 7900 XT has 20 GB"),
    "rx-7900-xtx": ("24GB", "an RX 7900 XTX has 24 GB"),
    "rx-9070": ("16GB", "an RX 9070 has 16 GB"),
    "rx-9070-xt": ("16GB", "an RX 9070 XT has 16 GB"),
    "w7900": ("48GB", "a Radeon PRO W7900 has 48 GB"),
    "r9700": ("32GB", "a Radeon AI PRO R9700 has 32 GB"),
}
"""AMD's GPUs: the memory to ask for, and a clause that says so (AMD's datasheets). Weights,
gradients, optimizer states and what autograd saves take the same bytes there; which kernels run, what they
and hipBLASLt take beside (PyTorch: 128 MiB a handle on gfx94x and gfx95x, 32 MiB on others) and how fast they
are is not known here."""


def threads_per_sm(compute_capability: tuple[int, int]) -> int:
    """Resident threads of one multiprocessor (CUDA programming guide, technical specifications)."""
    major, minor = compute_capability
    if compute_capability == (7, 5):
        return 1024
    return 1536 if (major == 8 and minor >= 6) or major >= 12 else 2048
