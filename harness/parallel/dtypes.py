"""PyTorch's dtypes by the names that recipes give them."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
