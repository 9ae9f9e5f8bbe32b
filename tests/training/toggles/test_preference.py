"""task: dpo and task: kto have the loss and the gradients that TRL's own trainers compute of such rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from harness.recipe import Recipe
from harness.training.batches import Batch
from harness.training.step import Training, train_step
from harness.training.toggles.preference import OF_REFERENCE, loss_of_pairs
from tests.support.tiny import NullObserver, built, step, tiny, weights

trl = pytest.importorskip("trl")
PAIRS: Any = {"task": "dpo"}
ANSWERS: Any = {"task": "kto", "micro_batch_size": 5}


def _moved(model: Any) -> None:
    """Away from the reference: everything that is trained."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.02)


def tokenizer() -> PreTrainedTokenizerFast:
    """One that a trainer of TRL asks for; no test here reads a text."""
    from tokenizers import Tokenizer, models

    words = {word: number for number, word in enumerate(("<pad>", "<eos>", "a", "b", "c"))}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=words, merges=[])), pad_token="<pad>", eos_token="<eos>"
    )


def _trainer(recipe: Recipe, training: Training, folder: Path) -> Any:
    """TRL's trainer of this model, with the same reference."""
    from datasets import Dataset

    config, trainer = (
        (trl.KTOConfig, trl.KTOTrainer) if recipe.task == "kto" else (trl.DPOConfig, trl.DPOTrainer)
    )
    arguments = config(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        beta=recipe.dpo_beta,
    )
    answers = {"completion": "b", "label": True} if recipe.task == "kto" else {"chosen": "b", "rejected": "c"}
    rows = Dataset.from_list([{"prompt": "a", **answers}] * 8)
    return trainer(
        training.model, training.reference, args=arguments, train_dataset=rows, processing_class=tokenizer()
    )


def same_as_theirs(
    training: Training,
    batch: Batch,
    num_tokens: int | None,
    theirs: Callable[[Any], Tensor],
    rounding: float = 1e-6,
) -> tuple[float, set[str]]:
    """Our loss of the batch, and the names of what has a gradient: both are those of `theirs`.

    `theirs`: model -> its loss of the batch. A gradient sums much: it may be ten times `rounding` apart.
    """
    model: Any = training.model
    losses, gradients = list[float](), list[dict[str, Tensor]]()
    for loss in (training.loss(model, batch, num_tokens), theirs(model)):
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad(set_to_none=True)
    assert losses[0] == pytest.approx(losses[1], rel=rounding, abs=0)
    ours, expected = gradients
    assert ours.keys() == expected.keys() != set()
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=10 * rounding, atol=rounding / 10, msg=name)
    return losses[0], set(ours)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"adapter": "lora"},
        {"dpo_beta": 0.5},
        {"family": "gpt2"},
        {"attention": "eager", "family": "gemma2"},
        ANSWERS,
        ANSWERS | {"adapter": "lora", "dpo_beta": 0.5},
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_trl(fields: dict[str, Any], tmp_path: Path) -> None:
    recipe = tiny(**PAIRS | fields)
    training, batches = built(recipe)
    trainer = _trainer(recipe, training, tmp_path)  # which keeps the adapter as it is now
    _moved(training.model)
    ((batch,), num_tokens) = next(batches)

    def theirs(model: Any) -> Tensor:
        completion = (batch["labels"] != -100).long()
        inputs = {"input_ids": batch["input_ids"], "completion_mask": completion}
        inputs["attention_mask"] = torch.ones_like(completion)
        if recipe.task == "kto":
            inputs |= {f"KL_{name}": tensor for name, tensor in inputs.items()}
            inputs["KL_input_ids"] = batch["mismatched_input_ids"]
            inputs["label"] = torch.tensor([True, True, True, False, False])
        return trainer.compute_loss(model, inputs)

    ours, _ = same_as_theirs(training, batch, num_tokens, theirs)
    for unlearned in (0.6931, 0.5):  # it has departed from the reference
        assert ours != pytest.approx(unlearned, abs=1e-4)


def test_how_far_the_model_has_departed_counts() -> None:
    """arXiv 2402.01306, equation 7, by hand: the answers of other prompts are likelier by 2 on average."""
    recipe = tiny(**ANSWERS, dpo_reference="precomputed", dpo_beta=0.25)
    training, batches = built(recipe)
    ((batch,), _) = next(batches)

    def told(prefix: str) -> Tensor:
        given = {name: batch[prefix + name] for name in ("input_ids", "labels")}
        model: Any = training.model
        return model(**given, use_cache=False, fused_lm_head=True).log_probs.sum(dim=1).detach()

    ahead = torch.tensor([1.0, -1.0, 2.0, 0.5, -3.0])
    batch |= {"chosen": told("") - ahead, "rejected": told("mismatched_") - torch.tensor([1.0, 3, 2, 0, 4])}
    expected = [1 - torch.sigmoid(0.25 * (a - 2)) for a in ahead[:3]]
    expected += [1 - torch.sigmoid(0.25 * (2 - a)) for a in ahead[3:]]
    torch.testing.assert_close(training.loss(training.model, batch, None), torch.stack(expected).mean())


def test_mismatched_answers_are_those_of_the_row_before() -> None:
    ((batch,), num_tokens) = next(built(tiny(**ANSWERS))[1])
    ids, mismatched = batch["input_ids"], batch["mismatched_input_ids"]
    assert torch.equal(mismatched[:, 0], ids[:, 0])
    assert torch.equal(mismatched[1:, 1:], ids[:-1, 1:])
    assert torch.equal(mismatched[0, 1:], ids[-1, 1:])
    assert num_tokens == 5 * 15


def test_before_the_first_step_the_model_is_its_reference() -> None:
    """arXiv 2305.18290, equation 7: log sigmoid of 0."""
    for fields in (
        {},
        {"adapter": "lora", "gradient_checkpointing": True},
        {"gradient_accumulation_steps": 3},
    ):
        training, batches = built(tiny(**PAIRS | fields))
        assert step(training, batches).item() == pytest.approx(0.693147, abs=1e-5)


def test_precomputed_is_what_the_reference_would_say() -> None:
    computed = tiny(**PAIRS)
    training, batches = built(computed)
    _moved(training.model)
    ((batch,), _) = next(batches)
    expected = training.loss(training.model, batch, None)
    with torch.no_grad():
        reference: Any = training.reference
        told = reference(**batch, use_cache=False, fused_lm_head=True).log_probs.sum(dim=1)
    given = dict(zip(("chosen", "rejected"), told.chunk(2), strict=True))
    loss = loss_of_pairs(computed.model_copy(update={"dpo_reference": "precomputed"}), training.model, None)
    torch.testing.assert_close(loss(training.model, batch | given, None), expected)


def test_synthetic_precomputed_values_are_those_of_an_even_chance() -> None:
    recipe = tiny(**PAIRS, dpo_reference="precomputed")
    training, batches = built(recipe)
    assert training.reference is None
    ((batch,), _) = next(batches)
    even = torch.log_softmax(torch.zeros(264), dim=0)[0] * (recipe.seq_len - 1)
    for name in ("chosen", "rejected"):
        torch.testing.assert_close(batch[name], even.expand(recipe.micro_batch_size))


def test_a_pair_is_two_rows_with_one_prompt() -> None:
    recipe = tiny(**PAIRS, micro_batch_size=3)
    _, batches = built(recipe)
    ((batch,), num_tokens) = next(batches)
    assert batch["input_ids"].shape == (6, recipe.seq_len)
    assert torch.equal(batch["input_ids"][:3, 0], batch["input_ids"][3:, 0])
    assert not torch.equal(batch["input_ids"][:3], batch["input_ids"][3:])
    assert num_tokens == 6 * (recipe.seq_len - 1)
    assert recipe.tokens_per_step == 6 * recipe.seq_len


def test_the_reference_stays_while_the_model_learns() -> None:
    recipe = tiny(**PAIRS, learning_rate=1e-2)
    training, batches = built(recipe)
    assert training.reference is not None
    before = {name: p.detach().clone() for name, p in training.reference.named_parameters()}
    start = weights(training)
    losses = [step(training, batches).item() for _ in range(3)]
    assert all(torch.equal(p, before[name]) for name, p in training.reference.named_parameters())
    assert any(not torch.equal(p, start[name]) for name, p in weights(training).items())
    assert losses[0] != losses[-1]


@pytest.mark.parametrize(
    "fields",
    [
        PAIRS,
        {"task": "reward"},
        {"task": "classification", "num_labels": 5},
        {"task": "embedding", "micro_batch_size": 3},
    ],
    ids=str,
)
def test_micro_batches_make_the_loss_of_their_mean(fields: dict[str, Any]) -> None:
    """As for any task: of k micro batches each counts 1/k."""
    training, batches = built(tiny(**fields, gradient_accumulation_steps=3))
    alone, _ = built(tiny(**fields))
    for each in (training, alone):
        _moved(each.model)
    (micro_batches, _) = next(batches)
    together = sum(training.loss(training.model, batch, None).item() for batch in micro_batches)
    apart = [alone.loss(alone.model, batch, None).item() for batch in micro_batches]
    assert together == pytest.approx(sum(apart) / 3, rel=1e-5)
    assert len({round(loss, 5) for loss in apart}) == 3


def test_dropout_is_off() -> None:
    training, batches = built(tiny("gpt2", **PAIRS))
    ((batch,), _) = next(batches)
    training.model.train()
    first, second = (training.loss(training.model, batch, None).item() for _ in range(2))
    assert first == second


NEAR = {"grpo_beta": 0.04}


@pytest.mark.parametrize(
    "fields", [{}, {"adapter": "lora"}, {"family": "gpt2"}, NEAR, NEAR | {"adapter": "lora"}], ids=str
)
def test_grpo_s_loss_and_gradients_are_those_of_trl(fields: dict[str, Any], tmp_path: Path) -> None:
    """Of answers that are there, by GRPOTrainer as it is configured by default, but for `beta`."""
    from datasets import Dataset

    recipe = tiny(task="grpo", micro_batch_size=4, **fields)
    training, batches = built(recipe)
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], num_generations=4, beta=0.0
    )
    arguments.per_device_train_batch_size, arguments.steps_per_generation = 4, 1
    trainer = trl.GRPOTrainer(
        training.model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
        processing_class=tokenizer(),
    )
    trainer.beta = recipe.grpo_beta  # now, or it would load a reference, of which the loss knows nothing
    trainer.current_gradient_accumulation_steps = 1
    _moved(training.model)
    ((batch,), num_tokens) = next(batches)
    reference = batch.get(OF_REFERENCE)
    assert (reference is not None) == (recipe.grpo_beta > 0)

    def theirs(model: Any) -> Tensor:
        prompt, completion = batch["input_ids"][:, :1], batch["input_ids"][:, 1:]
        inputs = {"prompt_ids": prompt, "completion_ids": completion, "advantages": batch["advantages"]}
        inputs |= {"prompt_mask": torch.ones_like(prompt), "completion_mask": torch.ones_like(completion)}
        inputs["num_items_in_batch"] = torch.tensor(num_tokens)
        if reference is not None:
            inputs["ref_per_token_logps"] = reference
        return trainer.compute_loss(model, inputs)

    same_as_theirs(training, batch, num_tokens, theirs)


@pytest.mark.parametrize("fields", [{}, {"adapter": "lora"}, {"family": "gpt2", "dpo_beta": 0.5}], ids=str)
def test_orpo_s_loss_and_gradients_are_those_of_trl(fields: dict[str, Any], tmp_path: Path) -> None:
    from datasets import Dataset

    orpo = pytest.importorskip("trl.experimental.orpo")
    recipe = tiny(task="orpo", **fields)
    training, batches = built(recipe)
    arguments = orpo.ORPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], beta=recipe.dpo_beta, max_length=16
    )
    trainer = orpo.ORPOTrainer(
        training.model,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 8),
        processing_class=tokenizer(),
    )
    _moved(training.model)
    ((batch,), num_tokens) = next(batches)

    def theirs(model: Any) -> Tensor:
        inputs: dict[str, Tensor] = {}
        for side, rows in {"chosen": slice(2), "rejected": slice(2, 4)}.items():
            inputs[f"{side}_input_ids"] = batch["input_ids"][rows]
            inputs[f"{side}_attention_mask"] = torch.ones_like(batch["input_ids"][rows])
            inputs[f"{side}_labels"] = batch["labels"][rows]
        return trainer.get_batch_loss_metrics(model, inputs)[0]

    same_as_theirs(training, batch, num_tokens, theirs)


def test_grpo_raises_what_was_rewarded() -> None:
    """Rows with an advantage of 1 become likelier, and those of -1 less likely."""
    recipe = tiny(task="grpo", micro_batch_size=4, learning_rate=1e-2)
    training, batches = built(recipe)
    micro_batches, num_tokens = next(batches)
    batch = micro_batches[0]

    def likely() -> Tensor:
        with torch.no_grad():
            told = training.model(input_ids=batch["input_ids"], labels=batch["labels"], fused_lm_head=True)
        return told.log_probs.sum(dim=1)

    before = likely()
    for _ in range(5):
        train_step(training, micro_batches, num_tokens, NullObserver())
    assert torch.equal((likely() - before).sign(), batch["advantages"])
