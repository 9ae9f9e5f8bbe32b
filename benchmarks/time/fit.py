"""Fit the parameters of harness/kernel_time to measured kernels, and write
harness/kernel_time/parameters.json.

    python -m benchmarks.time.fit COMPUTE.csv NETWORK.csv [--neusight FOLDER] [--steps 150] [--only PART ...]

COMPUTE.csv and NETWORK.csv have the forms of benchmarks/time/kernel_rows.py: measurements of microsoft/vidur
(MIT). FOLDER is scripts/asplos/data/dataset of trsharm25/NeuSight (MIT): PyTorch's own kernels in fp32, of
which the layer norm, the softmax, elementwise kernels and the products in fp32 are taken. Architectures that
neither of them has come from benchmarks/time/aiconfigurator.csv (see the module of that name), and attention
from benchmarks/time/attention.csv. A fifth is kept aside: of products whole shapes, with all their rows; of
the others sizes. What is written beside the parameters: source, count, and how far off the kept are.

Parts are products, memory, fp32, attention, links, devices, copies, blocks and unaligned (the last four in
benchmarks/time/fit_devices.py and fit_walks.py), and shapes, a file of its own that
benchmarks/time/fit_shapes.py makes with the parameters that are there then; one that is not named in --only
stays as it is. Products go on from the parameters that are there, unless --anew. Nothing here knows the time
of any training step.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.time.fit_devices import fit_blocks, fit_copies, fit_devices, reported_spread
from benchmarks.time.fit_products import architecture_of, fit_products
from benchmarks.time.fit_walks import fit_unaligned, fit_walks
from benchmarks.time.kernel_rows import AT_THE_LIMIT, KINDS, MACHINES, KernelRow, aside, device_of, read_rows
from benchmarks.time.residuals import residuals
from harness.hardware.roofline import sent_share
from harness.kernel_time.estimates import memory_figures, wire_s
from harness.kernel_time.memory_kernels import Memory, held_bytes, memory_s
from harness.kernel_time.numbers import SCALARS
from harness.kernel_time.parameters import FILE
from harness.system.files import write_whole

PARTS = (
    "products",
    "memory",
    "fp32",
    "attention",
    "links",
    "devices",
    "copies",
    "blocks",
    "unaligned",
    "shapes",
)
ATTENTION = Path(__file__).with_name("attention.csv")
OTHER_DEVICES = Path(__file__).with_name("aiconfigurator.csv")
MANY_BYTES = 1e6
SUSTAINED_CLOCK = {
    "8.0": (1200 / 1410, "A100 under load: github.com/liangan1/GPU_travel, performance/flash-attn"),
    "9.0": (
        (1575 + 1500) / 2 / 1980,
        "two devices: github.com/deepseek-ai/DeepGEMM/issues/120, github.com/tile-ai/TileOPs/pull/1588",
    ),
    "10.0": (1580 / 1965, "attention in a loop: github.com/flashinfer-ai/flashinfer/pull/2899"),
}
"""By compute capability: the clock at the power limit over the one that kernels run at between pauses. A
kernel that is measured alone does not show it; in a training step that computes most of its time the device
is at that limit."""
LIMIT_REACHED = {"9.0": {"free": 0.55, "full": 0.75}}
"""By compute capability: the shares of a step's time in products up to which the clock stays that of pauses,
and from which on it is the one of SUSTAINED_CLOCK. An H100 of 700 W took 600 W and kept 99 % of its boost
clock in a step with a share of a half, and its products had the time that they have alone
(profiles/h100/kernels.json); the published runs of the H100 compute three quarters of their time and more."""
USUAL_LAUNCH_US = 2.0
"""Of kernels that were measured with the time between launches: as vidur's smallest."""
VIDUR, NEUSIGHT = "microsoft/vidur (MIT)", "trsharm25/NeuSight (MIT)"
AICONFIGURATOR = "ai-dynamo/aiconfigurator (Apache-2.0)"
NEWER = "h100-cuda13"
"""A device of vidur's that is fitted once more, to kernels of later libraries. Its products are faster, and
elementwise kernels slower: vidur's reach the datasheet's bandwidth, as if a part of what they read had been
in the cache. The A100's steps take the time of vidur's (docs/time.md), those of aiconfigurator's bursts are
shorter."""
NEUSIGHT_DEVICES = {
    "NVIDIA A100 80GB PCIe": ("8.0", Memory(1.935e12, 40 * 2**20, 19.5e12)),
    "Tesla V100-PCIE-32GB": ("7.0", Memory(900e9, 6 * 2**20, 14.0e12)),
    "NVIDIA L4": ("8.9", Memory(300e9, 48 * 2**20, 30.3e12)),
    "Tesla T4": ("7.5", Memory(320e9, 4 * 2**20, 8.1e12)),
}
"""Compute capability and figures of the devices that are taken from there (NVIDIA's datasheets)."""
MEASURED_KERNELS = ("l4", "t4", "v100-32gb")
"""Of them, those that only NeuSight measured, by their names here."""
NEUSIGHT_FP32 = {
    "NVIDIA A100 80GB PCIe": ("8.0", 19.5e12),
    "NVIDIA H100 80GB HBM3": ("9.0", 67e12),
    "Tesla V100-PCIE-32GB": ("7.0", 14.0e12),
    "NVIDIA L4": ("l4", 30.3e12),
    "Tesla T4": ("t4", 8.1e12),
}
"""Compute capability, or the device where its power limit and not its architecture decides; peak in fp32."""


def least_squares(columns: Sequence[Any], target: Any) -> Any:
    """Factors of `columns`, none negative, that make their sum `target`; relative errors count, large ones
    little."""
    kept, weights = [*range(len(columns))], 1 / target
    factors = np.zeros(len(columns))
    for _ in range(12):
        matrix = np.stack([columns[c] * weights for c in kept], axis=1)
        found = np.linalg.lstsq(matrix, target * weights, rcond=None)[0]
        if (found < 0).any():
            kept = [c for c, value in zip(kept, found, strict=True) if value >= 0]
            continue
        factors = np.zeros(len(columns))
        factors[kept] = found
        off = np.abs(sum(f * c for f, c in zip(factors, columns, strict=True)) / target - 1)
        weights = 1 / target / np.sqrt(1 + (off / 0.05) ** 2)
    return factors


def fit_memory_kernel(device: Memory, moved: Any, seconds: Any) -> dict[str, float]:
    """The parameters of one kind of kernel on one device: the share of the cache and how much is evicted are
    tried, the rest follows."""
    best: tuple[float, dict[str, float]] = (np.inf, {})
    shares = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25)
    for share, evicted in product(shares, (0.0, 0.5, 1.0, 2.0)):
        cache = {"l2_share": share, "l2_evicted": evicted}
        held = held_bytes(np, device, cache, moved)
        launch, in_cache, beyond = least_squares([np.ones_like(moved), held, moved - held], seconds)
        beyond = beyond or in_cache
        fitted = cache | {
            "launch_us": round(launch * 1e6, 4),
            "l2_bytes_per_flop": round(1 / (in_cache or beyond) / device.fp32_flops_per_s, 5),
            "rate": round(1 / beyond / device.bytes_per_s, 4),
        }
        made = launch + held * (in_cache or beyond) + (moved - held) * beyond
        off = float(np.mean(np.sqrt((made / seconds - 1) ** 2 + 0.02**2)))
        best = min(best, (off, fitted), key=lambda each: each[0])
    return best[1]


def fit_memory(rows: Sequence[KernelRow], neusight: Path | None) -> dict[str, Any]:
    """Kernels that wait for memory, by `architecture_of` their device and kind. Of two sources the first
    counts: NeuSight's kernels were measured with the time between launches, and with a cache that held none
    of their bytes. So does of two devices the one whose memory is slower (of H100 and H200)."""
    found: dict[str, Any] = defaultdict(dict)
    for source, groups in (
        (VIDUR, _by_size(rows)),
        (AICONFIGURATOR, _by_size(read_rows(OTHER_DEVICES))),
        (NEUSIGHT, _neusight_kernels(neusight)),
    ):
        for (architecture, kind, device), measured in sorted(groups.items()):
            if kind in found[architecture]:
                continue
            sizes, seconds, kept = (np.array(column) for column in zip(*measured, strict=True))
            large = kept & (sizes >= MANY_BYTES)
            if source != NEUSIGHT:
                fitted = fit_memory_kernel(device, sizes[~kept], seconds[~kept])
            else:  # the launch is in the time: of large kernels only
                reached = sizes / seconds / device.bytes_per_s
                large = (sizes > 4 * device.l2_bytes) & (sizes < 2e9)
                rate = min(1.0, float(np.median(reached[large & ~kept])))
                fitted = _beyond_the_cache(rate, found[architecture].get("elementwise"))
                large &= kept
            estimated = [memory_s(SCALARS, device, fitted, size) for size in sizes[large]]
            found[architecture][kind] = {
                "fitted": fitted,
                "source": source,
                "count": int((~kept).sum()),
                "aside": residuals(seconds[large], estimated),
            }
    return dict(found)


def _beyond_the_cache(rate: float, elementwise: dict[str, Any] | None) -> dict[str, float]:
    """The parameters of a kind of which only kernels too large for the cache were measured. In the cache it
    is as much slower than elementwise kernels as beyond it; where these were not measured there either,
    nothing is found in the cache."""
    fitted = {"launch_us": USUAL_LAUNCH_US, "rate": round(rate, 4)}
    fitted |= {"l2_share": 0.0, "l2_evicted": 0.0, "l2_bytes_per_flop": 1.0}
    if elementwise is not None:
        known = elementwise["fitted"]
        in_cache = known["l2_bytes_per_flop"] * min(1.0, rate / known["rate"])
        fitted |= {name: known[name] for name in ("l2_share", "l2_evicted")}
        fitted["l2_bytes_per_flop"] = round(in_cache, 5)
    return fitted


Sizes = dict[tuple[str, str, Memory], list[tuple[float, float, bool]]]
"""By `architecture_of`, kind and device: bytes, seconds, and whether the kernel is kept aside."""


def _by_size(rows: Sequence[KernelRow]) -> Sizes:
    groups: Sizes = defaultdict(list)
    for row in rows:
        hardware = device_of(row.device)
        if row.is_product or row.is_collective or hardware is None:
            continue
        kind = KINDS.get(row.kernel, "elementwise")
        key = architecture_of(row.device, hardware), kind, memory_figures(hardware)
        groups[key].append((row.size_bytes, row.seconds, aside(row)))
    return groups


def _neusight_kernels(folder: Path | None) -> Sizes:
    """PyTorch's elementwise kernels, layer norm and softmax, in fp32, by the bytes that they move."""
    groups: Sizes = defaultdict(list)
    passes = {"add": 3, "mul": 3, "div": 3, "addu": 2, "mulu": 2, "gelu": 2, "tanh": 2, "ln": 2, "softmax": 2}
    kinds = {"ln": "norm", "softmax": "softmax"}
    files = product(("train", "test"), ("elem", "ln", "softmax")) if folder is not None else ()
    for part, name in files:
        with (folder / part / f"{name}.csv").open(newline="", encoding="utf-8") as lines:  # type: ignore[operator]
            for row in csv.DictReader(lines):
                operator, device = row["OPName"], row["Device"]
                if operator not in passes or device not in NEUSIGHT_DEVICES:
                    continue
                moved = 4.0 * passes[operator] * float(row["B"]) * float(row["H"])
                capability, figures = NEUSIGHT_DEVICES[device]
                kept = int(moved) // 2048 * 7919 % 5 == 0
                key = capability, kinds.get(operator, "elementwise"), figures
                groups[key].append((moved, float(row["Latency"]) / 1e3, kept))
    return groups


def fit_fp32(neusight: Path) -> dict[str, Any]:
    """Share of the peak that products of more than 50 GFLOP in fp32 reach: the median."""
    rates: dict[str, list[float]] = defaultdict(list)
    with (neusight / "test" / "linear.csv").open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            flops = 2.0 * float(row["B"]) * float(row["M"]) * float(row["N"]) * float(row["K"])
            if row["Device"] in NEUSIGHT_FP32 and flops > 5e10:
                key, peak = NEUSIGHT_FP32[row["Device"]]
                rates[key].append(flops / (float(row["Latency"]) / 1e3) / peak)
    found: dict[str, Any] = {
        key: {"rate": round(min(1.0, statistics.median(each)), 4), "count": len(each), "source": NEUSIGHT}
        for key, each in sorted(rates.items())
    }
    return found


def fit_attention() -> dict[str, Any]:
    """Fused attention, by compute capability, kernel, direction and head size."""
    groups: dict[tuple[str, str, str, str], list[tuple[int, int, float]]] = defaultdict(list)
    sources: dict[str, set[str]] = defaultdict(set)
    peaks = {"rtx-a5000": ("8.6", 111.1e12)}
    with ATTENTION.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["device"] in peaks:
                capability, peak = peaks[row["device"]]
            else:
                hardware = device_of(row["device"])
                assert hardware is not None, row
                capability = hardware.datasheet.compute_capability
                peak = hardware.peak_flops("fp16")
            key = capability, row["kernel"], row["direction"], row["head_dim"]
            reached = float(row["tflops"]) * 1e12 / peak
            if AT_THE_LIMIT in row["source"]:  # as fast as it would be at the boost clock, like the others
                reached /= SUSTAINED_CLOCK[capability][0]
            groups[key].append((int(row["seq_len"]), int(row["causal"]), reached))
            sources[capability].add(row["source"])
    found: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
    for (capability, kernel, direction, head_dim), each in sorted(groups.items()):
        length, causal, reached = (np.array(column, float) for column in zip(*each, strict=True))
        # 1 / reached = 1 / rate + short / rate / length, with a `short` for each mask
        columns = [np.ones_like(length), (1 - causal) / length, causal / length]
        base, short, short_causal = least_squares(columns, 1 / reached)
        made = base + short * columns[1] + short_causal * columns[2]
        if not (causal == 0).any():
            short = short_causal / 2
        if not (causal == 1).any():
            short_causal = short + _SHORT_CAUSAL * base
        slot = found[capability][kernel].setdefault(direction, {"fitted": {}, "residuals": {}})
        slot["fitted"][head_dim] = {
            "rate": round(1 / base, 4),
            "short": round(short / base, 1),
            "short_causal": round(short_causal / base, 1),
        }
        slot["residuals"][head_dim] = residuals(1 / reached, made)
    document: dict[str, Any] = {name: dict(kernels) for name, kernels in found.items()}
    for capability, texts in sources.items():
        document[capability]["sources"] = sorted(texts)
    return document


_SHORT_CAUSAL = 128.0
"""Tokens by which a causal kernel does more than half of the square: one block of the diagonal."""


def fit_links(rows: Sequence[KernelRow]) -> dict[str, Any]:
    """Collectives, by kind of link, collective, and ranks: in one machine ("8"), and in several ("16x8")."""
    groups: dict[tuple[str, str, str], list[KernelRow]] = defaultdict(list)
    for row in rows:
        if row.is_collective and row.device in MACHINES:
            one = row.ranks <= row.ranks_per_node
            together = str(row.ranks) if one else f"{row.ranks}x{row.ranks_per_node}"
            groups[MACHINES[row.device], row.kernel, together].append(row)
    found: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
    for (link, kind, together), each in sorted(groups.items()):
        share = sent_share(kind, each[0].ranks)
        kept = np.array([aside(row) for row in each])
        sent = np.array([share * row.size_bytes for row in each])
        seconds = np.array([row.seconds for row in each])
        fitted = _fit_wire(sent[~kept], seconds[~kept])
        large = kept & (sent >= MANY_BYTES * share)
        found[link][kind][together] = {
            "fitted": fitted,
            "count": int((~kept).sum()),
            "aside": residuals(seconds[large], wire_s(fitted, sent[large])),
        }
    document: dict[str, Any] = {link: dict(kinds) for link, kinds in found.items()}
    document["source"] = VIDUR
    return document


def _fit_wire(sent: Any, seconds: Any) -> dict[str, float]:
    chosen = sent >= 1e5
    sent, seconds = sent[chosen], seconds[chosen]
    best: tuple[float, dict[str, float]] = (np.inf, {})
    for small in (2e5, 5e5, 1e6, 2e6, 4e6, 8e6, 1.6e7, 3.2e7, 1e8):
        columns = [np.ones_like(sent), sent, sent / (1 + sent / small)]
        start, each, slower = least_squares(columns, seconds)
        if each <= 0:
            continue
        off = np.abs((start + each * sent + slower * columns[2]) / seconds - 1)
        fitted = {
            "start_us": round(float(start) * 1e6, 3),
            "rate": float(f"{1 / each:.5g}"),
            "slower": float(f"{slower:.5g}"),
            "small_bytes": small,
        }
        best = min(best, (float(np.mean(np.minimum(off, 0.5))), fitted), key=lambda each: each[0])
    return best[1]


def spreads(document: dict[str, Any]) -> dict[str, Any]:
    """Measured over estimated, by what estimates err alike in: 10th and 90th percentile, of the kernels kept
    aside; `elsewhere` is how far off an architecture is with the parameters of another."""

    def of(each: Iterable[list[float]]) -> list[float]:
        lows, highs = zip(*each, strict=True)
        return [round(statistics.median(lows), 4), round(statistics.median(highs), 4)]

    products = {name: each["aside"]["measured_over_estimated"] for name, each in document["products"].items()}
    kernels = {
        name: of(
            [
                found["aside"]["measured_over_estimated"]
                for kind, found in kinds.items()
                if not kind.endswith("_vllm")
            ]
        )
        for name, kinds in document["memory"].items()
    }
    shapes = [
        found["measured_over_estimated"]
        for kernels_of in document["attention"].values()
        for kernel, directions in kernels_of.items()
        if kernel != "sources"
        for direction in directions.values()
        for found in direction["residuals"].values()
    ]
    links = [
        each["aside"]["measured_over_estimated"]
        for link, kinds in document["links"].items()
        if link != "source"
        for groups in kinds.values()
        for each in groups.values()
    ]
    elsewhere = of(each["elsewhere"] for each in document["products"].values())
    rates = [kinds["elementwise"]["fitted"]["rate"] for kinds in document["memory"].values()]
    middle = statistics.median(rates)
    others = [round(min(rates) / middle, 4), round(max(rates) / middle, 4)]
    return {
        "product": {
            "by_architecture": products,
            "all": of(products.values()),
            "elsewhere": elsewhere,
            "reported": reported_spread(),
        },
        "memory": {"by_architecture": kernels, "all": of(kernels.values()), "elsewhere": others},
        "attention": {"by_architecture": {}, "all": of(shapes), "elsewhere": elsewhere},
        "collective": {"by_architecture": {}, "all": of(links), "elsewhere": [0.8, 1.25]},
        "copy": {"by_architecture": {}, "all": [0.9, 1.25], "elsewhere": [1.0, 1.0]},
    }


def _capability(row: KernelRow) -> str:
    hardware = device_of(row.device)
    return hardware.datasheet.compute_capability if hardware is not None else ""


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("compute", type=Path)
    parser.add_argument("network", type=Path)
    parser.add_argument("--neusight", type=Path)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--devices", nargs="+", help="of products: fit these, and leave the others")
    parser.add_argument("--anew", action="store_true")
    given = parser.parse_args(arguments)
    rows, others, document = read_rows(given.compute), read_rows(OTHER_DEVICES), {}
    known = {_capability(row) for row in rows}
    new = [row for row in others if _capability(row) not in known or row.device == NEWER]
    names = {row.device for row in (*rows, *new) if not row.is_collective}
    measured = sorted({found.name for found in map(device_of, names) if found})
    if FILE.exists():
        document = json.loads(FILE.read_text(encoding="utf-8"))
    parts: dict[str, Callable[[], Any]] = {
        "products": lambda: fit_products(
            {VIDUR: rows, AICONFIGURATOR: new},
            {} if given.anew else document.get("products", {}),
            steps=given.steps,
            num_rows=given.rows,
            devices=given.devices,
        ),
        "memory": lambda: fit_memory(rows, given.neusight),
        "fp32": lambda: fit_fp32(given.neusight),
        "attention": fit_attention,
        "links": lambda: fit_links(read_rows(given.network)),
        "devices": lambda: fit_devices(measured),
        "copies": lambda: fit_copies(document["memory"], MEASURED_KERNELS),
        "blocks": lambda: fit_blocks() | fit_walks(),
        "unaligned": fit_unaligned,
    }
    for part in given.only:
        if part == "shapes" or (part == "fp32" and given.neusight is None):
            continue
        document["fp32_products" if part == "fp32" else part] = parts[part]()
    document["sources"] = [VIDUR, AICONFIGURATOR, NEUSIGHT]
    document["sustained_clock"] = {
        name: {"fraction": round(fraction, 4), "source": source} | LIMIT_REACHED.get(name, {})
        for name, (fraction, source) in SUSTAINED_CLOCK.items()
    }
    document["measured_devices"] = measured
    document["spread"] = spreads(document)
    write_whole(FILE, json.dumps(document, indent=1, sort_keys=True) + "\n")
    if "shapes" in given.only:  # in a process that reads the new parameters
        subprocess.run([sys.executable, "-m", "benchmarks.time.fit_shapes", str(given.compute)], check=True)


if __name__ == "__main__":
    main()
