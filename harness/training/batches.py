"""The batches of a recipe: they have fixed shapes, do not end, and are the same for the same seed.

Every row has seq_len tokens. Short examples are padded on the right, and no attention_mask is passed for the
padding: attention is causal, so no real token sees what comes after it, and outputs at the padding have no
label. A mask would change only the kernel (with one, sdpa cannot use flash attention), so memory and time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from harness.data import NOT_PREDICTED, Row, Rows, build_tokenizer, corpus_rows, pair_rows, synthetic_rows
from harness.errors import InputError
from harness.parallel import ALONE, Ranks
from harness.recipe import Recipe
from harness.training.document_masks import flash_lengths, positions, separate_densely
from harness.training.images import Images
from harness.training.toggles.attention import additive_mask_dtype
from harness.training.toggles.preference import GOOD, MISMATCHED, OF_REFERENCE, REFERENCE
from harness.training.toggles.scores import LAST

MOST_MICRO_BATCHES = 10_000
"""The most micro batches of a step that is simulated."""
MOST_DRAWN = 2**28
"""The most tokens of a simulated step whose documents' lengths are drawn, which takes about 4 s."""
Batch = dict[str, Any]
"""What a loss needs of a micro batch; for task: sft, keyword arguments of the model: input_ids and labels of
shape (rows, seq_len), and so on."""


class StepBatches(NamedTuple):
    """The micro batches of one optimizer step, on the CPU."""

    batches: list[Batch]
    """gradient_accumulation_steps micro batches. Each has input_ids and, unless it is of pairs that are
    learned as a whole, labels: both int64 (rows, seq_len), but a classification's labels are int64 (rows,).
    Of pairs, the first half of the rows is chosen and the second rejected. Others, where the task has them:
    the reference's precomputed log-probabilities, fp32 (micro_batch_size,); grpo's advantages, fp32 (rows,),
    and the reference's log-probabilities, fp32 (rows, seq_len - 1);
    of a file, the places of the last tokens of texts that are embedded, int64 (rows,), and how many of the
    marked answers are good, an int. With packing there is also what training/document_masks.py returns."""
    num_tokens: int
    """How many tokens the whole step predicts: labels that are not -100; where rows are learned as a whole,
    all tokens. A model's loss shifts the labels by one and never predicts the first token of a row, which has
    the label -100 here. So transformers.Trainer (5.17 to 5.23) counts the same: by `labels[..., 1:]` for a
    loss that it knows to shift, and by `labels` for any other."""


@dataclass(eq=False)
class Batches(Iterator[StepBatches]):
    """An endless iterator over steps. `state` returns its position, to be saved and loaded."""

    recipe: Recipe
    rows: Rows
    vocab_size: int
    dense_mask: bool
    """Whether a mask keeps packed documents apart, or positions and, for flash attention, lengths."""
    ranks: Ranks = ALONE
    images: Images | None = None
    rows_drawn: int = 0
    """How many rows all ranks together have drawn."""

    def __next__(self) -> StepBatches:
        batches = [self._micro_batch() for _ in range(self.recipe.gradient_accumulation_steps)]
        if self.recipe.by_row:
            return StepBatches(batches, self.recipe.tokens_per_step)
        return StepBatches(batches, sum(int((b["labels"] != NOT_PREDICTED).sum()) for b in batches))

    def skip(self, steps: int) -> None:
        """Continue as if `steps` more steps had been drawn."""
        micro_batches = steps * self.recipe.gradient_accumulation_steps
        self.rows_drawn += micro_batches * self.recipe.rows * self.ranks.data_ranks

    def _next_rows(self) -> range:
        """The places of the rows of this rank's next micro batch. Those of all ranks follow one another, as
        in a larger micro batch of one process."""
        size = self.recipe.rows
        first = self.rows_drawn + self.ranks.data_rank * size
        self.rows_drawn += size * self.ranks.data_ranks
        return range(first, first + size)

    def _micro_batch(self) -> Batch:
        drawn = self._next_rows()
        rows = sorted((self.rows.draw(row) for row in drawn), key=lambda row: not row.good)
        batch: Batch = {"input_ids": torch.from_numpy(np.stack([row.input_ids for row in rows]))}
        if not self.recipe.by_row:
            batch["labels"] = torch.from_numpy(np.stack([row.labels for row in rows]))
        elif not self.recipe.pairs:
            batch["labels"] = batch["input_ids"][:, -1] % self.recipe.scores  # which can be learned
        if self.rows.mismatched is not None:
            return batch | _inputs_of_pairs(self.recipe, drawn, rows, self.rows.mismatched)
        if self.recipe.pairs:
            shared = -1 if self.recipe.embeds else 0  # the token whose state is read, or the prompt
            batch["input_ids"][len(rows) // 2 :, shared] = batch["input_ids"][: len(rows) // 2, shared]
        if self.recipe.prefers and not self.recipe.computes_reference:
            batch |= _indifferent(self.recipe, self.vocab_size)
        if self.recipe.unpaired:
            batch |= _mismatched(batch)
        if self.recipe.rewarded:
            batch["advantages"] = torch.tensor([1.0 if row % 2 else -1.0 for row in range(len(rows))])
        if self.recipe.regularized:
            log_probs = torch.tensor(-math.log(self.vocab_size))  # as if all tokens were equally likely
            batch[OF_REFERENCE] = log_probs.expand(len(rows), self.recipe.seq_len - 1)
        if self.recipe.packing:
            lengths = [row.document_lengths for row in rows]
            if self.dense_mask:
                batch |= separate_densely(lengths, additive_mask_dtype(self.recipe))
            else:
                batch |= {"position_ids": positions(lengths)}
                batch |= flash_lengths(lengths) if self.recipe.flash_package else {}
        return batch if self.images is None else self.images.into(batch, drawn, self.recipe.seed)

    def state(self) -> dict[str, int | None]:
        """The position in the data, as values of JSON. After `load_state` of it, the same steps follow."""
        return {"rows_drawn": self.rows_drawn, "num_rows": self.rows.num_rows, "seed": self.recipe.seed}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned. Raises InputError for that of other data or another seed."""
        for field, ours in (("num_rows", self.rows.num_rows), ("seed", self.recipe.seed)):
            if state.get(field) != ours:
                raise InputError(
                    f"the saved position in the data has {field}: {state.get(field)}, and this run {ours}. "
                    "Resume with the recipe and the data the run began with."
                )
        rows_drawn = state.get("rows_drawn")
        if not isinstance(rows_drawn, int) or rows_drawn < 0:
            raise InputError(f"the saved position in the data has rows_drawn: {rows_drawn}. Begin a new run.")
        self.rows_drawn = rows_drawn


@dataclass(eq=False)
class BatchShapes(Batches):
    """Batches of which only the shapes are real: no row is made, however long it is.

    A tensor here is one element, expanded to the shape. A copy to the meta device makes the same tensor as a
    copy of the real one to a GPU. Raises InputError for a step that is too large to be simulated.
    """

    def __post_init__(self) -> None:
        recipe = self.recipe
        if recipe.gradient_accumulation_steps > MOST_MICRO_BATCHES:
            raise InputError(
                f"gradient_accumulation_steps: {recipe.gradient_accumulation_steps}: a step is simulated "
                f"micro batch by micro batch, at most {MOST_MICRO_BATCHES:,} of them. Set fewer."
            )
        if recipe.packing and recipe.flash_package and recipe.tokens_per_step > MOST_DRAWN:
            raise InputError(
                "packing: flash attention wants the lengths of the documents, which are drawn singly, and "
                f"a step has {recipe.tokens_per_step:,} tokens. Lower seq_len, or set packing: false."
            )

    def __next__(self) -> StepBatches:
        """The next step. `num_tokens` counts every token: no shape depends on labels, and there are none."""
        batches = [self._micro_batch() for _ in range(self.recipe.gradient_accumulation_steps)]
        return StepBatches(batches, self.recipe.tokens_per_step)

    def _micro_batch(self) -> Batch:
        size, seq_len = self.recipe.rows, self.recipe.seq_len
        drawn = self._next_rows()
        batch: Batch = {"input_ids": _shape(size, seq_len)}
        if not (self.recipe.by_row and self.recipe.pairs):
            batch["labels"] = _shape(size) if self.recipe.scores else _shape(size, seq_len)
        if self.recipe.prefers and not self.recipe.computes_reference:
            batch |= _indifferent(self.recipe, self.vocab_size)
        if self.recipe.unpaired:
            batch |= {MISMATCHED + name: batch[name] for name in ("input_ids", "labels")}
        if self.recipe.rewarded:
            batch["advantages"] = _shape(size, dtype=torch.float32)
        if self.recipe.regularized:
            batch[OF_REFERENCE] = _shape(size, seq_len - 1, dtype=torch.float32)
        if self.images is not None:
            batch |= self.images.shapes(size, seq_len)
        if not self.recipe.packing:
            return batch
        batch["position_ids"] = _shape(size, seq_len)
        if self.dense_mask:
            dtype = additive_mask_dtype(self.recipe) or torch.bool
            return batch | {"attention_mask": _shape(size, 1, seq_len, seq_len, dtype=dtype)}
        if not self.recipe.flash_package:
            return batch
        return batch | flash_lengths([self.rows.lengths(row) for row in drawn])


def _inputs_of_pairs(
    recipe: Recipe, drawn: range, rows: Sequence[Row], mismatched: Callable[[int, int], Row]
) -> Batch:
    """What a loss needs in addition to rows of a file: where texts that are embedded end; or how many of the
    marked answers are good, which come first, and each prompt with the answer of the row before."""
    if recipe.embeds:
        return {LAST: torch.tensor([row.document_lengths[0] - 1 for row in rows])}
    if not recipe.unpaired:
        return {}
    others = [mismatched(row, before) for row, before in zip(drawn, (drawn[-1], *drawn), strict=False)]
    arrays = {name: np.stack([getattr(row, name) for row in others]) for name in ("input_ids", "labels")}
    batch: Batch = {MISMATCHED + name: torch.from_numpy(array) for name, array in arrays.items()}
    return batch | {GOOD: sum(row.good for row in rows)}


def _indifferent(recipe: Recipe, vocab_size: int) -> Batch:
    """The reference's log-probabilities of synthetic pairs, as if all tokens were equally likely."""
    log_prob = -(recipe.seq_len - 1) * math.log(vocab_size)
    return {name: torch.full((recipe.micro_batch_size,), log_prob) for name in REFERENCE}


def _mismatched(batch: Batch) -> Batch:
    """The inputs of synthetic rows with each row's prompt, its first token, and the answer before it."""
    mismatched = {name: batch[name].roll(1, dims=0) for name in ("input_ids", "labels")}
    mismatched["input_ids"][:, 0] = batch["input_ids"][:, 0]
    return {MISMATCHED + name: tensor for name, tensor in mismatched.items()}


def _shape(*sizes: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor of this shape that takes one element of memory."""
    if math.prod(sizes) * dtype.itemsize >= 2**63:  # torch counts bytes in 64 bits
        raise InputError(
            f"micro_batch_size: {sizes[0]} and seq_len: {sizes[-1]} ask for a batch of more than 2^63 bytes. "
            "Set smaller ones."
        )
    return torch.zeros((), dtype=dtype).expand(sizes)


def build_batches(
    recipe: Recipe,
    *,
    vocab_size: int,
    tokenizer_source: str | None,
    dense_mask: bool,
    sliding_window: int | None = None,
    shapes_only: bool = False,
    ranks: Ranks = ALONE,
    images: Images | None = None,
) -> Batches:
    """The batches of `recipe` for a model with a vocabulary of `vocab_size`. They are those of one of
    `ranks`, whose rows follow one another in the order of the data.

    - `tokenizer_source`: a checkpoint folder or a Hugging Face id, used for pretrained weights.
    - `dense_mask`: whether a mask keeps packed documents apart (sdpa, eager), or their positions and lengths.
    - `sliding_window`: the model's attention window in tokens, if it has one. transformers does not narrow a
      mask that it is given to the window, so with packing and dense_mask no document is longer than that.
    - `images`: the images of a row, for a model that takes images.
    - `shapes_only`: whether the batches are for a step on shape-only tensors (BatchShapes).

    Without packing, a .txt file is one stream of tokens that is cut into rows, without the remainder, and any
    other example is a row of its own, padded or cut off at seq_len. With packing, documents (paragraphs of a
    .txt file, or examples) share rows. A document longer than seq_len is cut into several, but a prompt with
    its completion is cut off, since the rest would lack its prompt. data/pairs.py says the same about pairs
    and marked answers. Raises InputError for data that cannot be read, does not fit the model, or has
    nothing to train on.
    """
    longest = recipe.seq_len
    if recipe.packing and dense_mask and sliding_window is not None:
        longest = min(longest, sliding_window)
    if recipe.data == "synthetic":
        rows = synthetic_rows(recipe, vocab_size, longest)
    else:
        tokenizer = build_tokenizer(recipe, vocab_size=vocab_size, tokenizer_source=tokenizer_source)
        if recipe.compares:
            rows = pair_rows(recipe, tokenizer, vocab_size)
        else:
            rows = corpus_rows(recipe, tokenizer, vocab_size, longest)
    kind = BatchShapes if shapes_only else Batches
    return kind(recipe, rows, vocab_size, dense_mask, ranks, images)
