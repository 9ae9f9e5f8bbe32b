"""The one training step: its phases, its loss, accumulation by real tokens, and clipping."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from harness.training.batches import Batch
from harness.training.model import build_training
from harness.training.step import Training, train_step
from tests.support.tiny import CPU, NullObserver, built, tiny, train, weights

TOKENS_IN_ROW = (15, 9, 2, 1)
"""Predicted tokens of four rows: micro batches of one row differ by a factor of 15."""


def rows() -> Batch:
    """Four rows of 16 random tokens, with labels for the first few tokens of each."""
    input_ids = torch.randint(0, 264, (4, 16), generator=torch.Generator().manual_seed(7))
    labels = input_ids.clone()
    labels[:, 0] = -100
    for row, num_tokens in zip(labels, TOKENS_IN_ROW, strict=True):
        row[num_tokens + 1 :] = -100
    return {"input_ids": input_ids, "labels": labels}


def split(batch: Batch, size: int) -> list[Batch]:
    parts = {name: value.split(size) for name, value in batch.items()}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]


def gradients_of(training: Training, batches: list[Batch]) -> tuple[dict[str, Tensor], float]:
    """The gradients the optimizer is about to use, and the loss of the step."""
    seen: dict[str, Tensor] = {}

    def keep() -> None:
        seen.update({n: p.grad.clone() for n, p in training.model.named_parameters() if p.grad is not None})

    loss = train_step(training, batches, sum(TOKENS_IN_ROW), NullObserver(optimizer_step=keep))
    return seen, loss.item()


def gradients_by_torch(training: Training) -> tuple[dict[str, Tensor], float]:
    """The mean cross-entropy over every predicted token of the four rows, and its gradients."""
    batch = rows()
    logits = training.model(input_ids=batch["input_ids"]).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    named = {n: p for n, p in training.model.named_parameters() if p.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True)), loss.item()


def test_phases_are_named_in_order() -> None:
    names: list[str] = []

    class Listening(NullObserver):
        @contextmanager
        def phase(self, name: str) -> Iterator[None]:
            names.append(name)
            yield
            names.append("end")

    training = build_training(tiny(), CPU)
    train_step(training, split(rows(), 2), sum(TOKENS_IN_ROW), Listening())
    assert names == [*["forward", "end", "backward", "end"] * 2, "optimizer_step", "end"]


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("micro_batch_size", [4, 2, 1])
def test_micro_batches_of_unequal_tokens_equal_one_batch(adapter: str, micro_batch_size: int) -> None:
    recipe = tiny(adapter=adapter)
    expected, expected_loss = gradients_by_torch(build_training(recipe, CPU))
    ours, loss = gradients_of(build_training(recipe, CPU), split(rows(), micro_batch_size))
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert ours.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-4, atol=1e-7, msg=name)


def test_the_mean_of_means_would_be_another_loss() -> None:
    """Without this the test above could not fail."""
    training = build_training(tiny(), CPU)
    means = [training.model(**batch).loss.item() for batch in split(rows(), 1)]
    assert sum(means) / len(means) != pytest.approx(gradients_by_torch(training)[1], rel=1e-4)


def test_accumulation_of_a_recipe_equals_its_larger_batch() -> None:
    whole = train(tiny(micro_batch_size=4), 5)
    parts = train(tiny(micro_batch_size=1, gradient_accumulation_steps=4), 5)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)
    # Adam divides a gradient by its own size: where it is all but 0, rounding decides the sign
    for name, weight in weights(whole.training).items():
        assert (weight - weights(parts.training)[name]).abs().mean() < 1e-6, name


def test_gradients_are_freed_and_the_loss_holds_no_graph() -> None:
    training, batches = built(tiny())
    micro_batches, num_tokens = next(batches)
    loss = train_step(training, micro_batches, num_tokens, NullObserver())
    assert (loss.shape, loss.requires_grad) == (torch.Size([]), False)
    assert all(p.grad is None for p in training.model.parameters())


def test_a_model_and_an_optimizer_are_enough() -> None:
    """What a recipe does not ask for changes nothing: without it the step is that of plain PyTorch."""
    model = build_training(tiny(), CPU).model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients, _ = gradients_by_torch(Training(model, torch.optim.SGD(model.parameters())))
    training = Training(model, torch.optim.SGD(model.parameters(), lr=1.0))
    train_step(training, split(rows(), 2), sum(TOKENS_IN_ROW), NullObserver())
    for name, p in model.named_parameters():
        torch.testing.assert_close(before[name] - p.detach(), gradients[name], rtol=1e-3, atol=1e-6, msg=name)


def test_ranks_sum_gradients_in_the_last_micro_batch_alone() -> None:
    said: list[bool] = []

    def summing(last: bool) -> AbstractContextManager[None]:
        said.append(last)
        return nullcontext()

    training = replace(build_training(tiny(), CPU), summing=summing)
    train_step(training, split(rows(), 1), sum(TOKENS_IN_ROW), NullObserver())
    assert said == [False, False, False, True]
