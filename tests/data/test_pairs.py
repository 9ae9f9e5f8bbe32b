"""Files of pairs and of marked answers: the rows that TRL's own trainers make of them, and the refusals."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from harness.data import check_data
from harness.data.lengths import example_lengths
from harness.errors import InputError
from harness.recipe.recipe import Recipe
from harness.training.batches import Batches, build_batches
from tests.support.places import MODELS
from tests.support.tiny import built, tiny

CHAT = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
PAIRS = [
    {"prompt": "What is it?", "chosen": " It is blue.", "rejected": " It is a long green thing."},
    {"prompt": "Say a", "chosen": "b", "rejected": "bb and more of them than fit into a row, ever"},
    {"prompt": "A prompt that alone fills all of the row here", "chosen": "x", "rejected": "y"},
    {"prompt": "How?", "chosen": " So.<eos>", "rejected": ""},
]
IMPLICIT = [
    {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    {"chosen": "same", "rejected": "same and more"},
]
ASKED = {"role": "user", "content": "What?"}
SPOKEN: list[dict[str, Any]] = [
    {
        "chosen": [ASKED, {"role": "assistant", "content": "Blue."}],
        "rejected": [ASKED, {"role": "assistant", "content": "Green!"}],
    },
    {
        "prompt": [ASKED],
        "chosen": [{"role": "assistant", "content": "a"}],
        "rejected": [{"role": "assistant", "content": "bb"}],
    },
]
MARKED = [
    {"prompt": "What is it?", "completion": " Blue.", "label": False},
    {"prompt": "Say a", "completion": "a", "label": True},
    {"prompt": "How?", "completion": " So and so, and so on and on for ever", "label": True},
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with a tokenizer of bytes, some of which merge across the end of a prompt."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "b"), ("I", "t")]
    words = ["<pad>", "<bos>", "<eos>", *alphabet, *("".join(merge) for merge in merges)]
    bytes_of = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=merges))
    bytes_of.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    bytes_of.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    bytes_of.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bytes_of, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    fast.chat_template = CHAT
    fast.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def _written(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def _epoch(task: Any, data: str, checkpoint: Path, size: int, **fields: Any) -> list[dict[str, Any]]:
    """The micro batches of about one epoch."""
    recipe = Recipe(
        model=str(MODELS / "llama.json"), task=task, data=data, seq_len=24, micro_batch_size=size,
        weights="pretrained", **fields,
    )  # fmt: skip
    batches: Batches = build_batches(
        recipe, vocab_size=264, tokenizer_source=str(checkpoint), dense_mask=True
    )
    assert batches.rows.num_rows is not None
    return [step.batches[0] for step in islice(batches, batches.rows.num_rows // recipe.rows)]


def _theirs(task: str, rows: list[dict[str, Any]], checkpoint: Path, folder: Path) -> Any:
    """TRL's trainer with such rows, of which it keeps the tokens."""
    trl: Any = pytest.importorskip("trl")
    from datasets import Dataset

    config, trainer = {
        "dpo": (trl.DPOConfig, trl.DPOTrainer),
        "kto": (trl.KTOConfig, trl.KTOTrainer),
        "reward": (trl.RewardConfig, trl.RewardTrainer),
    }[task]
    size = {"per_device_train_batch_size": len(rows)}
    arguments = config(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], max_length=24,
        gradient_checkpointing=False, **size,
    )  # fmt: skip
    training, _ = built(tiny(task=task))
    compared = [training.model] if task == "reward" else [training.model, training.reference]
    return trainer(
        *compared,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(checkpoint),
    )


def _rows_of(ids: Tensor, learned: Tensor | None, real: Tensor) -> list[tuple[list[int], list[int]]]:
    """(tokens, those of them that are learned) of each row, without padding."""
    learned = torch.zeros_like(ids) if learned is None else learned
    return [
        (row[kept].tolist(), row[kept & (told == 1)].tolist())
        for row, told, kept in zip(ids, learned, real.bool(), strict=True)
    ]


@pytest.mark.parametrize(
    ("task", "rows"),
    [
        ("dpo", PAIRS),
        ("dpo", IMPLICIT),
        ("dpo", SPOKEN[:1]),
        ("dpo", SPOKEN[1:]),
        ("reward", PAIRS[:1] + PAIRS[3:]),
        ("reward", PAIRS),
        ("reward", IMPLICIT),
        ("reward", SPOKEN[:1]),
        ("reward", SPOKEN[1:]),
    ],
)
def test_pairs_are_the_rows_of_trl(
    task: str, rows: list[dict[str, Any]], checkpoint: Path, tmp_path: Path
) -> None:
    trainer = _theirs(task, rows, checkpoint, tmp_path)
    theirs = [trainer.data_collator([row]) for row in trainer.train_dataset]
    ours = _epoch(task, _written(tmp_path, rows), checkpoint, 1)
    assert len(ours) == len(theirs)

    def of_theirs(batch: Any) -> Any:
        return _rows_of(batch["input_ids"], batch.get("completion_mask"), batch["attention_mask"])

    def of_ours(batch: Any) -> Any:
        learned = (batch["labels"] != -100).long() if "labels" in batch else None
        return _rows_of(batch["input_ids"], learned, batch["input_ids"] != 0)

    assert sorted(map(of_ours, ours)) == sorted(map(of_theirs, theirs))
    assert all(batch["input_ids"].shape == (2, 24) for batch in ours)


def test_marked_answers_are_the_rows_of_trl(checkpoint: Path, tmp_path: Path) -> None:
    trainer = _theirs("kto", MARKED, checkpoint, tmp_path)
    (ours,) = _epoch("kto", _written(tmp_path, MARKED), checkpoint, 3)
    theirs = trainer.data_collator(list(trainer.train_dataset))
    expected = _rows_of(theirs["input_ids"], theirs["completion_mask"], theirs["attention_mask"])
    learned = (ours["labels"] != -100).long()
    found = _rows_of(ours["input_ids"], learned, ours["input_ids"] != 0)
    good = [row for row, label in zip(expected, theirs["label"].tolist(), strict=True) if label]
    assert ours["good"] == 2
    assert sorted(found[:2]) == sorted(good)
    assert sorted(found) == sorted(expected)


def test_mismatched_answers_of_a_file_are_cut_as_trl_cuts_them(checkpoint: Path, tmp_path: Path) -> None:
    """Two examples can be paired in one way only, whatever their order."""
    rows = MARKED[::2]
    trainer = _theirs("kto", rows, checkpoint, tmp_path)
    theirs = trainer.data_collator(list(trainer.train_dataset))
    (ours,) = _epoch("kto", _written(tmp_path, rows), checkpoint, 2)
    expected = _rows_of(
        *(theirs[f"KL_{name}"] for name in ("input_ids", "completion_mask", "attention_mask"))
    )
    ids, labels = ours["mismatched_input_ids"], ours["mismatched_labels"]
    assert sorted(_rows_of(ids, (labels != -100).long(), ids != 0)) == sorted(expected)


def test_the_loss_of_a_file_s_marked_answers_is_trl_s(checkpoint: Path, tmp_path: Path) -> None:
    """With other numbers of good and bad answers than synthetic ones have."""
    rows = [*MARKED, MARKED[1]]
    trainer = _theirs("kto", rows, checkpoint, tmp_path)
    (batch,) = _epoch("kto", _written(tmp_path, rows), checkpoint, 4)
    recipe = tiny(task="kto", micro_batch_size=4)
    training, _ = built(recipe)
    trainer.model, trainer.ref_model = training.model, training.reference
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in training.model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    ours = training.loss(training.model, batch, None)
    inputs: dict[str, Any] = {"label": torch.arange(4) < batch["good"]}
    for theirs, mine in {"": "", "KL_": "mismatched_"}.items():
        inputs[f"{theirs}input_ids"] = batch[f"{mine}input_ids"]
        inputs[f"{theirs}completion_mask"] = (batch[f"{mine}labels"] != -100).long()
        inputs[f"{theirs}attention_mask"] = (batch[f"{mine}input_ids"] != 0).long()
    assert batch["good"] == 3
    assert ours.item() == pytest.approx(trainer.compute_loss(training.model, inputs).item(), rel=1e-5)


def test_a_score_and_an_embedding_are_read_before_the_padding(tmp_path: Path) -> None:
    """What stands behind a text's end changes nothing."""
    data = _written(tmp_path, PAIRS[:1])
    training, batches = built(tiny(task="reward", data=data, seq_len=64, micro_batch_size=1))
    ((batch,), _) = next(batches)
    ids = batch["input_ids"]
    ends = [len((PAIRS[0]["prompt"] + PAIRS[0][side]).encode()) for side in ("chosen", "rejected")]
    with torch.no_grad():
        found = training.model(input_ids=ids).logits[:, 0]
        alone = [training.model(input_ids=ids[n : n + 1, :end]).logits[0, 0] for n, end in enumerate(ends)]
    torch.testing.assert_close(found, torch.stack(alone), rtol=1e-4, atol=1e-6)

    texts = [{"anchor": "short", "positive": "a longer text"}, {"anchor": "another", "positive": "text"}]
    training, batches = built(
        tiny(task="embedding", data=_written(tmp_path, texts), seq_len=32, micro_batch_size=2)
    )
    ((batch,), _) = next(batches)
    loss = training.loss(training.model, batch, None)
    behind = torch.arange(32) > batch["last"][:, None]
    assert behind.any(dim=1).all()
    changed = {"input_ids": torch.where(behind, 7, batch["input_ids"]), "last": batch["last"]}
    assert training.loss(training.model, changed, None).item() == pytest.approx(loss.item(), rel=1e-5)
    changed["last"] = batch["last"] - 1
    assert training.loss(training.model, changed, None).item() != pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("task", "row", "says"),
    [
        (
            "dpo",
            {"prompt": "a", "chosen": "b"},
            "line 2 lacks the column `rejected`: it has 'prompt', 'chosen'",
        ),
        (
            "reward",
            {"text": "a"},
            "line 2 lacks the column `chosen`.*task: reward needs `chosen` and `rejected`",
        ),
        ("kto", {"prompt": "a", "completion": "b"}, "line 2 lacks the column `label`"),
        ("kto", {"prompt": "a", "completion": "b", "label": "yes"}, "line 2: `label` is 'yes'. Give true or"),
        ("embedding", {"anchor": "a"}, "line 2 lacks the column `positive`"),
        ("embedding", {"anchor": "a", "positive": "b", "negative": "c"}, "line 2 has `negative`"),
        (
            "embedding",
            {"anchor": ["a"], "positive": "b"},
            "line 2: `anchor` is list. Give `anchor` and `positive`",
        ),
        ("dpo", {"prompt": "a", "chosen": [ASKED], "rejected": [ASKED]}, "line 2: `prompt` is str. Give"),
        ("orpo", {"chosen": 1, "rejected": "b"}, "line 2: `chosen` is int, not a string"),
    ],
)
def test_what_is_wrong_is_named_by_its_line_and_column(
    task: Any, row: dict[str, Any], says: str, tmp_path: Path
) -> None:
    fine = {"anchor": "a", "positive": "b"} if task == "embedding" else PAIRS[0] | MARKED[0]
    recipe = tiny(task=task, data=_written(tmp_path, [fine, row]), seq_len=64)
    for ask in (check_data, built):
        with pytest.raises(InputError, match=says):
            ask(recipe)


def test_a_file_that_leaves_nothing_to_learn_is_refused(tmp_path: Path) -> None:
    recipe = tiny(task="dpo", data=_written(tmp_path, PAIRS[2:3]), seq_len=8)
    for ask in (check_data, built):
        with pytest.raises(InputError, match="nothing to learn from: none of its 1 examples"):
            ask(recipe)


def test_lengths_of_pairs_are_of_both_rows(tmp_path: Path) -> None:
    data = _written(tmp_path, IMPLICIT)
    ends = [len(text) + 1 for pair in IMPLICIT for text in pair.values()]
    assert example_lengths(tiny(task="dpo"), data, vocab_size=264).tolist() == ends


def test_a_file_of_pairs_is_trained_on(tmp_path: Path) -> None:
    recipe = tiny(task="dpo", data=_written(tmp_path, PAIRS), seq_len=24, micro_batch_size=2)
    _, batches = built(recipe)
    assert batches.rows.num_skipped == 1
    first = next(batches).batches[0]["input_ids"]
    assert torch.equal(first[0, :4], first[2, :4])
    other = tiny(task="dpo", data=recipe.data, seq_len=24, micro_batch_size=2)
    assert torch.equal(first, next(built(other)[1]).batches[0]["input_ids"])
