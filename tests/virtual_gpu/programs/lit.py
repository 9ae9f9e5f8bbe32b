"""Lightning's Trainer: a module with its own optimizer, two micro batches a step, bf16 by autocast."""

import lightning
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU()
        )
        self.head = torch.nn.Linear(1024, 10)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(self.head(self.body(images)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


data = DataLoader(TensorDataset(torch.randn(192, 256), torch.randint(0, 10, (192,))), batch_size=32)
trainer = lightning.Trainer(
    max_steps=3,
    accelerator="gpu",
    devices=1,
    precision="bf16-mixed",
    accumulate_grad_batches=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Digits(), data)
print(f"done: peak {torch.cuda.max_memory_allocated()} bytes, reserved {torch.cuda.max_memory_reserved()}")
