"""task: reward and task: classification have the loss and the gradients of TRL's RewardTrainer and of
transformers' Trainer, task: embedding those of its formula and of sentence-transformers' loss."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from harness.errors import InputError
from harness.training.model import build_model
from harness.training.model_config import load_config
from tests.support.places import MODELS
from tests.support.tiny import CPU, built, step, tiny, train, weights
from tests.training.toggles.test_preference import same_as_theirs, tokenizer

REWARD: Any = {"task": "reward"}
CLASSES: Any = {"task": "classification", "num_labels": 5}
EMBEDDING: Any = {"task": "embedding", "micro_batch_size": 3}
MODEL = str(MODELS / "llama.json")


def _theirs(task: str, model: Any, folder: Path) -> Any:
    """The library's own trainer of this model."""
    settings: Any = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": []}
    if task == "classification":
        return Trainer(model, TrainingArguments(**settings))
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    arguments = trl.RewardConfig(**settings, gradient_checkpointing=False)
    rows = Dataset.from_list([{"chosen": "ab", "rejected": "ac"}] * 2)
    return trl.RewardTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer())


@pytest.mark.parametrize(
    "fields",
    [
        *({"family": "llama"}, {"family": "gpt2"}, {"family": "gemma2", "attention": "eager"}),
        *({"family": "mixtral"}, {"adapter": "lora"}, {"adapter": "ia3"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("task", [REWARD, CLASSES], ids=["reward", "classification"])
def test_loss_and_gradients_are_those_of_the_library(
    task: dict[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    recipe = tiny(**task, **fields)
    training, batches = built(recipe)
    trainer = _theirs(recipe.task, training.model, tmp_path)
    ((batch,), num_tokens) = next(batches)
    training.model.eval()  # RewardTrainer has no dropout; here a classification has none either
    given: dict[str, Tensor] = {"attention_mask": torch.ones_like(batch["input_ids"])} | batch
    _, learned = same_as_theirs(training, batch, num_tokens, lambda model: trainer.compute_loss(model, given))
    assert any("score" in name for name in learned)


@pytest.mark.parametrize(
    "fields",
    [{}, {"family": "gpt2"}, {"family": "gemma2", "attention": "eager"}, {"adapter": "lora"}],
    ids=str,
)
def test_texts_are_told_apart_by_their_last_tokens(fields: dict[str, Any]) -> None:
    """arXiv 1807.03748, equation 4, over cosines times 20: a cross-entropy whose classes are the texts."""
    training, _ = built(tiny(**EMBEDDING, **fields))
    batch = {"input_ids": torch.randint(0, 200, (6, 16))}
    training.model.double().eval()  # theirs are read in one pass, so sums are rounded otherwise

    def theirs(model: Any) -> Tensor:
        told = model(input_ids=batch["input_ids"]).last_hidden_state
        pairs = functional.cosine_similarity(told[:3, None, -1], told[None, 3:, -1], dim=-1)
        return functional.cross_entropy(20 * pairs, torch.arange(3))

    ours, _ = same_as_theirs(training, batch, None, theirs, 1e-5)
    assert ours > 1e-3


def test_the_loss_of_texts_is_that_of_sentence_transformers() -> None:
    losses: Any = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    training, batches = built(tiny(**EMBEDDING))
    ((batch,), _) = next(batches)
    model: Any = training.model
    texts, others = model(input_ids=batch["input_ids"]).last_hidden_state[:, -1].chunk(2)
    expected = losses.MultipleNegativesRankingLoss(None).compute_loss_from_embeddings([texts, others], None)
    assert training.loss(model, batch, None).item() == pytest.approx(expected.item(), rel=1e-5)


def test_texts_that_belong_together_end_alike() -> None:
    recipe = tiny(**EMBEDDING)
    ((batch,), num_tokens) = next(built(recipe)[1])
    assert batch.keys() == {"input_ids"}
    assert torch.equal(batch["input_ids"][:3, -1], batch["input_ids"][3:, -1])
    assert not torch.equal(batch["input_ids"][:3], batch["input_ids"][3:])
    assert num_tokens == recipe.tokens_per_step == 6 * recipe.seq_len


def test_which_texts_belong_together_can_be_learned() -> None:
    losses = train(tiny(**EMBEDDING | {"micro_batch_size": 16}, learning_rate=3e-3), 40).losses
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0]


def test_batches_have_what_the_task_reads() -> None:
    recipe = tiny(**CLASSES, micro_batch_size=3)
    ((batch,), num_tokens) = next(built(recipe)[1])
    assert batch["input_ids"].shape == (3, recipe.seq_len)
    assert batch["labels"].shape == (3,)
    assert set(batch["labels"].tolist()) <= set(range(5))
    assert num_tokens == 3 * recipe.seq_len
    recipe = tiny(**REWARD, micro_batch_size=3)
    ((batch,), num_tokens) = next(built(recipe)[1])
    assert batch.keys() == {"input_ids"}
    assert batch["input_ids"].shape == (6, recipe.seq_len)
    assert torch.equal(batch["input_ids"][:3, 0], batch["input_ids"][3:, 0])
    assert num_tokens == recipe.tokens_per_step == 6 * recipe.seq_len


def test_the_classes_of_synthetic_rows_can_be_learned() -> None:
    losses = train(tiny(**CLASSES, learning_rate=3e-3, micro_batch_size=16), 60).losses
    assert losses[0] > 1.2
    assert sum(losses[-5:]) / 5 < 0.7 * losses[0]


def test_there_is_no_head_of_words_and_no_logits_of_them() -> None:
    model = build_model(tiny(**CLASSES), CPU)
    assert not hasattr(model, "lm_head")
    assert model.score.weight.shape == (5, 64)
    assert build_model(tiny(**REWARD), CPU).score.weight.shape == (1, 64)
    model = build_model(tiny(**EMBEDDING), CPU)
    assert not hasattr(model, "lm_head")
    assert not hasattr(model, "score")


def test_an_adapter_trains_a_copy_of_the_head() -> None:
    recipe = tiny(**REWARD, adapter="lora", learning_rate=1e-2)
    training, batches = built(recipe)
    before = weights(training)
    step(training, batches)
    changed = {name for name, weight in weights(training).items() if not torch.equal(weight, before[name])}
    heads = {name for name in before if "score" in name}
    assert {name.rpartition("score.")[2] for name in heads & changed} == {"modules_to_save.default.weight"}
    assert all("lora_" in name for name in changed - heads)
    assert changed - heads


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_the_head_is_not_muon_s(adapter: Any) -> None:
    optimizer: Any = built(tiny(**CLASSES, adapter=adapter, optimizer="muon"))[0].optimizer
    by_muon = [w for each in optimizer._each if isinstance(each, torch.optim.Muon) for w in _weights(each)]
    assert by_muon
    assert all(weight.shape != (5, 64) for weight in by_muon)
    assert any(weight.shape == (5, 64) for weight in _weights(optimizer))


def _weights(optimizer: Any) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def test_dropout_is_off_where_rows_are_compared(tmp_path: Path) -> None:
    config = json.loads((MODELS / "gpt2.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)))

    def kept(task: Any) -> set[float]:
        model = build_model(tiny(model=str(path), task=task), CPU)
        return {module.p for module in model.modules() if isinstance(module, nn.Dropout)}

    assert kept("reward") == {0.0}
    assert kept("classification") == {0.1}


def test_a_language_model_s_checkpoint_gets_a_new_head(tmp_path: Path) -> None:
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL))
    theirs.save_pretrained(tmp_path)
    model = build_model(tiny(**CLASSES, model=str(tmp_path), weights="pretrained"), CPU)
    assert torch.equal(model.model.embed_tokens.weight, theirs.model.embed_tokens.weight)
    assert model.score.weight.abs().sum() > 0


def test_a_language_model_s_checkpoint_embeds_without_its_head(tmp_path: Path) -> None:
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL))
    theirs.save_pretrained(tmp_path)
    model = build_model(tiny(**EMBEDDING, model=str(tmp_path), weights="pretrained"), CPU)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, theirs.model.get_parameter(name)), name


def test_a_model_without_such_a_head_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "cohere", "hidden_size": 64}')
    with pytest.raises(InputError, match="transformers has no cohere with a head of scores"):
        load_config(tiny(**REWARD, model=str(tmp_path / "config.json")))
