"""ResNet-50 on the virtual GPU, beside what NVIDIA published of its own training script: the convolutions.

    python -m benchmarks.virtual_gpu.resnet50 [--out FILE]

The numbers are those of one GPU in DeepLearningExamples ("Training performance results" in the README of
PyTorch/Classification/ConvNets/resnet50v1.5), and the rows a step and the memory format those of its
configs.yml. Nothing is fitted to them. Their script is another: the loader, the augmentation and PyTorch's
release (21.03) are not the ones here. A row takes ten seconds.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.command import parser_of
from harness.system import PACKAGE, provenance, write_whole

OUT = PACKAGE.parent / "profiles" / "published" / "resnet50.json"
SOURCE = "github.com/NVIDIA/DeepLearningExamples, 291f0d0"
STEPS = 4


class Row(NamedTuple):
    """One published number, of `rows` images a step; `mixed`: by automatic mixed precision, channels last."""

    gpu: str
    mixed: bool
    rows: int
    measured: float
    """Images a second."""


ROWS = (
    Row("a100-80gb", True, 256, 2470),
    Row("a100-80gb", False, 256, 938),
    Row("v100-16gb", True, 256, 1200),
    Row("v100-16gb", False, 112, 367),
    Row("v100-32gb", True, 256, 1156),
    Row("v100-32gb", False, 112, 356),
)
"""In fp32 without mixed precision: an A100 multiplies it in TF32, and a V100 has no such units."""


def train(mixed: bool, rows: int) -> None:
    """The program: some steps of SGD with momentum, with cuDNN trying its plans as NVIDIA's script has it."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.backends.cudnn.benchmark = True
    layout = torch.channels_last if mixed else torch.contiguous_format
    model: Any = ResNetForImageClassification(ResNetConfig(num_labels=1000)).cuda()
    model.train().to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.256, momentum=0.875, weight_decay=3e-5)
    scaler = torch.amp.GradScaler("cuda", enabled=mixed)
    images = torch.randn(rows, 3, 224, 224, device="cuda").contiguous(memory_format=layout)
    labels = torch.randint(1000, (rows,), device="cuda")
    for _ in range(STEPS):
        with torch.autocast("cuda", torch.float16, enabled=mixed):
            loss = torch.nn.functional.cross_entropy(model(images).logits, labels, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def estimated(row: Row) -> dict[str, Any]:
    """What the row's program takes on its virtual GPU."""
    program = [sys.executable, "-m", "benchmarks.virtual_gpu.resnet50", "--train", str(row.rows)]
    with tempfile.TemporaryDirectory() as folder:
        emulate = [sys.executable, "-m", "harness", "emulate", "--gpu", row.gpu, "--out", folder, "--"]
        done = subprocess.run(
            [*emulate, *program, *(["--mixed"] if row.mixed else [])],
            cwd=PACKAGE.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{row}: {done.stderr[-3000:]}")
        (clock,) = (json.loads(path.read_bytes()) for path in Path(folder).glob("*-times.json"))
    images_per_s = row.rows / clock["step_time_s"]
    return {
        **row._asdict(),
        "estimated": images_per_s,
        "error": images_per_s / row.measured - 1,
        "hfu": clock["hfu"],
        "kernels_s": clock["kernels_s"],
    }


def main() -> None:
    parser = parser_of("benchmarks.virtual_gpu.resnet50", __doc__)
    parser.add_argument("--train", type=int, metavar="ROWS", help="run the program, with ROWS images a step")
    parser.add_argument("--mixed", action="store_true", help="the program by automatic mixed precision")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.train:
        train(options.mixed, options.train)
        return
    rows = [estimated(row) for row in ROWS]
    for row in rows:
        how = "mixed" if row["mixed"] else "fp32"
        print(f"{row['gpu']} {how}: {row['measured']} images/s, estimated {row['estimated']:.0f}")
    found = {"source": SOURCE, "provenance": provenance(), "rows": rows}
    write_whole(options.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
