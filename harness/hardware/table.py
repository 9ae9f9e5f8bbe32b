"""The hardware table: the datasheet of each device. Imports no torch."""

from typing import Any, NamedTuple

MIB = 2**20
FP8_SINCE = 8.9
"""The first compute capability with fp8 units, that of Ada. For dense products with sums in fp32, all
datasheets below have twice the rate of 16 bit."""


class Cited(NamedTuple):
    """A number and the place that it was read in."""

    value: float
    source: str


class Datasheet(NamedTuple):
    """One device of the table."""

    name: str
    """The name in the table: h100."""
    driver_name: str
    """The name that the driver gives it: NVIDIA H100 80GB HBM3."""
    title: str
    """The name for readers: H100 SXM 80 GB."""
    compute_capability: str
    """As 9.0."""
    sm_count: int
    """Streaming multiprocessors, as in CUDA's device properties (NVIDIA's architecture whitepapers)."""
    l2_bytes: int
    """Bytes of the second-level cache, from the same."""
    memory_bytes: Cited
    """Bytes of memory that CUDA sees."""
    memory_bandwidth: Cited
    """Bytes per second."""
    flops: dict[str, Cited]
    """Dense FLOP/s by dtype (fp32, bf16, fp16, fp8), without the dtypes that the device has no units for."""
    host_link: Cited
    """Bytes per second to the host, and as many from it."""
    gpu_link: Cited
    """Bytes per second to a GPU of the same machine: half of NVLink's bidirectional, or the host link's."""


def _pcie(generation: int, lanes: int = 16) -> Cited:
    """Bytes per second, in one direction, of PCI Express: of every 130 bits, 128 are data."""
    rate = {3: 8e9, 4: 16e9, 5: 32e9}[generation]
    source = f"PCI Express Base Specification, generation {generation}, {lanes} lanes"
    return Cited(rate * lanes * 128 / 130 / 8, source)


def _nvlink(bidirectional: float, source: str) -> Cited:
    return Cited(bidirectional / 2, f"half of {bidirectional / 1e9:g} GB/s bidirectional: {source}")


def _seen_by_cuda(name: str, nvidia_smi_mib: int) -> Cited:
    """Bytes of memory that CUDA sees, by PyTorch; or nvidia-smi's total less what the driver keeps."""
    total = f"nvidia-smi, memory total: {nvidia_smi_mib} MiB ({_TOTALS})"
    if name not in _CAPACITIES:
        return Cited(nvidia_smi_mib * MIB - _KEPT_BY_DRIVER, f"{total}, less what the driver keeps of others")
    gib, source = _CAPACITIES[name]
    return Cited(round(gib * 1024) * MIB, f"PyTorch's out-of-memory message: {gib} GiB ({source}); {total}")


def _gpu(
    name: str,
    driver_name: str,
    title: str,
    compute_capability: str,
    mib: int,
    *,
    sms: int,
    l2: int,
    bandwidth: float,
    fp32: float,
    half: float,
    source: str,
    pcie: int = 0,
    lanes: int = 16,
    c2c: float = 0.0,
    nvlink: float | None = None,
    bf16: bool = True,
) -> Datasheet:
    dtypes = {"fp32": fp32, "fp16": half} | ({"bf16": half} if bf16 else {})
    if float(compute_capability) >= FP8_SINCE:
        dtypes["fp8"] = 2 * half
    return Datasheet(
        name,
        driver_name,
        title,
        compute_capability,
        sm_count=sms,
        l2_bytes=l2 * MIB,
        memory_bytes=_seen_by_cuda(name, mib),
        memory_bandwidth=Cited(bandwidth, source),
        flops={dtype: Cited(value, source) for dtype, value in dtypes.items()},
        host_link=Cited(c2c / 4, f"NVLink-C2C, {c2c / 1e9:g} GB/s in both directions for two GPUs: {source}")
        if c2c
        else _pcie(pcie, lanes),
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
"""GiB that PyTorch reports as a GPU's capacity, and where. They vary by a few tenths with the driver."""
_KEPT_BY_DRIVER = MIB * 1024 // 2
"""Bytes of nvidia-smi's total that CUDA does not see, for devices without a capacity above: those have 0.37
(RTX 4090) to 0.75 GiB (A100 80 GB)."""
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
_GB200 = "NVIDIA GB200 NVL72 datasheet, per GPU (2,500 = 360 PFLOP/s with sparsity / 2 / 72)"

_VOLTA: dict[str, Any] = {"pcie": 3, "nvlink": 300e9, "bf16": False}

# fmt: off
DATASHEETS: tuple[Datasheet, ...] = (
    _gpu("gb200", "NVIDIA GB200", "GB200 186 GB", "10.0", 189471,
         sms=152, l2=126, bandwidth=8e12, fp32=80e12, half=2500e12, source=_GB200, c2c=900e9, nvlink=1800e9),
    _gpu("b200", "NVIDIA B200", "B200 SXM 180 GB", "10.0", 183359,
         sms=148, l2=126, bandwidth=7.7e12, fp32=75e12, half=2250e12, source=_B200, pcie=5, nvlink=1800e9),
    _gpu("h200", "NVIDIA H200", "H200 SXM 141 GB", "9.0", 143771,
         sms=132, l2=50, bandwidth=4.8e12, fp32=67e12, half=989.5e12, source=_H200, pcie=5, nvlink=900e9),
    _gpu("h100", "NVIDIA H100 80GB HBM3", "H100 SXM 80 GB", "9.0", 81559,
         sms=132, l2=50, bandwidth=3.35e12, fp32=67e12, half=989.5e12, source=_H100, pcie=5, nvlink=900e9),
    _gpu("h100-nvl", "NVIDIA H100 NVL", "H100 NVL 94 GB", "9.0", 95830,
         sms=132, l2=50, bandwidth=3.9e12, fp32=60e12, half=835.5e12, source=_H100, pcie=5, nvlink=600e9),
    _gpu("h100-pcie", "NVIDIA H100 PCIe", "H100 PCIe 80 GB", "9.0", 81559,
         sms=114, l2=50, bandwidth=2.0e12, fp32=51e12, half=756.5e12, source=_H100, pcie=5, nvlink=600e9),
    _gpu("a100-80gb", "NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB", "8.0", 81920,
         sms=108, l2=40, bandwidth=2.039e12, fp32=19.5e12, half=312e12, source=_A100, pcie=4, nvlink=600e9),
    _gpu("a100-40gb", "NVIDIA A100-SXM4-40GB", "A100 SXM 40 GB", "8.0", 40960,
         sms=108, l2=40, bandwidth=1.555e12, fp32=19.5e12, half=312e12, source=_A100, pcie=4, nvlink=600e9),
    _gpu("l40s", "NVIDIA L40S", "L40S 48 GB", "8.9", 46068,
         sms=142, l2=96, bandwidth=864e9, fp32=91.6e12, half=362.05e12, source=_L40S, pcie=4),
    _gpu("l4", "NVIDIA L4", "L4 24 GB", "8.9", 23034,
         sms=58, l2=48, bandwidth=300e9, fp32=30.3e12, half=121e12, source=_L4, pcie=4),
    _gpu("a10g", "NVIDIA A10G", "A10G 24 GB", "8.6", 23028,
         sms=80, l2=6, bandwidth=600e9, fp32=35e12, half=70e12, source=_A10G, pcie=4),
    _gpu("a40", "NVIDIA A40", "A40 48 GB", "8.6", 46068,
         sms=84, l2=6, bandwidth=696e9, fp32=37.4e12, half=149.7e12, source=_A40, pcie=4, nvlink=112.5e9),
    _gpu("t4", "Tesla T4", "T4 16 GB", "7.5", 15360,
         sms=40, l2=4, bandwidth=320e9, fp32=8.1e12, half=65e12, source=_T4, pcie=3, bf16=False),
    _gpu("v100-16gb", "Tesla V100-SXM2-16GB", "V100 SXM2 16 GB", "7.0", 16160,
         sms=80, l2=6, bandwidth=900e9, fp32=15.7e12, half=125e12, source=_V100, **_VOLTA),
    _gpu("v100-32gb", "Tesla V100-SXM2-32GB", "V100 SXM2 32 GB", "7.0", 32510,
         sms=80, l2=6, bandwidth=900e9, fp32=15.7e12, half=125e12, source=_V100, **_VOLTA),
    _gpu("rtx-3090", "NVIDIA GeForce RTX 3090", "RTX 3090 24 GB", "8.6", 24576,
         sms=82, l2=6, bandwidth=936e9, fp32=35.6e12, half=71e12, source=_GA102, pcie=4, nvlink=112.5e9),
    _gpu("rtx-4090", "NVIDIA GeForce RTX 4090", "RTX 4090 24 GB", "8.9", 24564,
         sms=128, l2=72, bandwidth=1008e9, fp32=82.6e12, half=165.2e12, source=_ADA, pcie=4),
    _gpu("rtx-5090", "NVIDIA GeForce RTX 5090", "RTX 5090 32 GB", "12.0", 32607,
         sms=170, l2=96, bandwidth=1792e9, fp32=104.8e12, half=209.5e12, source=_GB202, pcie=5),
    _gpu("rtx-a6000", "NVIDIA RTX A6000", "RTX A6000 48 GB", "8.6", 49140,
         sms=84, l2=6, bandwidth=768e9, fp32=38.7e12, half=154.8e12, source=_A6000, pcie=4, nvlink=112.5e9),
    _gpu("rtx-6000-ada", "NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada 48 GB", "8.9", 49140,
         sms=142, l2=96, bandwidth=960e9, fp32=91.1e12, half=364.2e12, source=_ADA6000, pcie=4),
    _gpu("rtx-3080", "NVIDIA GeForce RTX 3080", "RTX 3080 10 GB", "8.6", 10240,
         sms=68, l2=5, bandwidth=760e9, fp32=29.8e12, half=59.5e12, source=_GA102, pcie=4),
    _gpu("rtx-3070", "NVIDIA GeForce RTX 3070", "RTX 3070 8 GB", "8.6", 8192,
         sms=46, l2=4, bandwidth=448e9, fp32=20.3e12, half=40.6e12, source=_GA102, pcie=4),
    _gpu("rtx-3060", "NVIDIA GeForce RTX 3060", "RTX 3060 12 GB", "8.6", 12288,
         sms=28, l2=3, bandwidth=360e9, fp32=12.7e12, half=25.5e12, source=_GA106, pcie=4),
    _gpu("rtx-4060-ti-16gb", "NVIDIA GeForce RTX 4060 Ti", "RTX 4060 Ti 16 GB", "8.9", 16380,
         sms=34, l2=32, bandwidth=288e9, fp32=22.06e12, half=44.1e12, source=_ADA_GEFORCE, pcie=4, lanes=8),
    _gpu("rtx-4070-ti-super", "NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER 16 GB", "8.9", 16376,
         sms=66, l2=48, bandwidth=672e9, fp32=44.1e12, half=88.2e12, source=_ADA_GEFORCE, pcie=4),
    _gpu("rtx-4080", "NVIDIA GeForce RTX 4080", "RTX 4080 16 GB", "8.9", 16376,
         sms=76, l2=64, bandwidth=716.8e9, fp32=48.7e12, half=97.5e12, source=_ADA_GEFORCE, pcie=4),
    _gpu("rtx-5060-ti-16gb", "NVIDIA GeForce RTX 5060 Ti", "RTX 5060 Ti 16 GB", "12.0", 16311,
         sms=36, l2=32, bandwidth=448e9, fp32=23.7e12, half=47.4e12, source=_GB20X, pcie=5, lanes=8),
    _gpu("rtx-5070-ti", "NVIDIA GeForce RTX 5070 Ti", "RTX 5070 Ti 16 GB", "12.0", 16303,
         sms=70, l2=48, bandwidth=896e9, fp32=43.9e12, half=87.9e12, source=_GB20X, pcie=5),
    _gpu("rtx-5080", "NVIDIA GeForce RTX 5080", "RTX 5080 16 GB", "12.0", 16303,
         sms=84, l2=64, bandwidth=960e9, fp32=56.3e12, half=112.6e12, source=_GB20X, pcie=5),
    _gpu("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
         "RTX PRO 6000 96 GB", "12.0", 97887,
         sms=188, l2=128, bandwidth=1792e9, fp32=125.9e12, half=503.8e12, source=_PRO6000, pcie=5),
)
# fmt: on

TABLE_NAMES = {sheet.driver_name: sheet.name for sheet in DATASHEETS}
"""The device of the hardware table that has a driver's name. A GPU with any other name has no datasheet here,
and so no MFU."""

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
"""AMD's GPUs: the value of --memory for a question about one, and a clause that says why (AMD's datasheets).
Weights, gradients, optimizer states and what autograd saves take the same bytes there. Not known here is
which kernels run, how fast they are, and what they and hipBLASLt take in addition (PyTorch gives hipBLASLt
128 MiB a handle on gfx94x and gfx95x, and 32 MiB on others)."""


def threads_per_sm(compute_capability: tuple[int, int]) -> int:
    """The most resident threads of one multiprocessor (CUDA programming guide, technical specifications)."""
    major, minor = compute_capability
    if compute_capability == (7, 5):
        return 1024
    return 1536 if (major == 8 and minor >= 6) or major >= 12 else 2048
