"""The formula of a recipe around its own sizes, derived from a few simulations or read from the cache."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from harness.architecture import find_config, read_config
from harness.errors import InputError
from harness.fit.few_layers import decoder_config
from harness.fit.simulations import Simulations, few_layers_first
from harness.formula import Piece, Point, Term, Terms, in_dimensions, point_of, terms_at_peak
from harness.hardware import Hardware
from harness.recipe import Recipe
from harness.units import in_gib

LETTERS = {
    "hidden_size": "H",
    "n_embd": "H",
    "intermediate_size": "F",
    "moe_intermediate_size": "E",
    "vocab_size": "V",
    "num_experts": "X",
    "num_local_experts": "X",
    "n_routed_experts": "X",
    "num_experts_per_tok": "T",
}
"""The textbooks' letter for each dimension, by its field in a model's config."""
MEANINGS = {
    "H": "numbers of a hidden state",
    "F": "numbers inside an MLP",
    "E": "numbers inside an expert",
    "V": "words in the vocabulary",
    "X": "experts",
    "T": "experts that a token is sent to",
    "Q": "numbers of all heads of queries",
    "K": "numbers of all heads of keys",
    "A": "numbers of all heads of queries, keys and values",
    "R": "the adapter's rank",
    "D": "numbers of a head",
    "N": "heads of attention",
}
"""What each letter counts, as it is printed behind its number."""
GROWING = ("activations", "temporaries", "inputs")
"""Categories of memory that may grow with the batch."""
SHOWN = 24
"""As many terms are printed one by one; the rest are summed up in one line."""


@dataclass(frozen=True)
class DerivedFormula:
    """The allocated bytes at the peak of a recipe, as a sum of terms in its sizes."""

    point: Point
    """The recipe's own sizes."""
    piece: Piece
    """The requests that hold at `point` and around it."""
    terms: Terms
    """What is alive at the peak at `point`."""
    dimensions: dict[str, int]
    """The model's dimensions, and its heads of attention, by letter."""
    exact: bool
    """Whether the formula explains more simulated sizes than it takes to fit it."""
    name: str = "recipe"
    """The name of the recipe, which is printed first."""
    gpus: int = 1
    """How many GPUs a weight is divided among."""

    @property
    def range(self) -> str:
        """A sentence about the sizes for which the formula holds."""
        seen = ", ".join(f"{rows:,} x {tokens:,}" for rows, tokens in self.piece.points)
        rows, tokens = zip(*self.piece.points, strict=True)
        if not self.exact:
            return f"Of these sizes alone: other sizes make other requests. Simulated at {seen}."
        batch = f"B from {min(rows):,} to {max(rows):,}" if len(set(rows)) > 1 else f"B = {rows[0]:,}"
        step = self.piece.sequence_step
        lengths = f"S from {min(tokens):,} to {max(tokens):,} in steps of {step:,}"
        sequence = lengths if len(set(tokens)) > 1 else f"S = {tokens[0]:,}"
        return f"Exact for {batch} and {sequence}: simulated at {seen}."

    def spelled(self, term: Term) -> str:
        """The size of one allocation of `term`, written with the letters of the model's dimensions."""
        letters = spelling(self.dimensions, self.piece)
        return spell(term, letters, of_tokens=term.category in GROWING, gpus=self.gpus)

    def as_json(self) -> dict[str, Any]:
        """What `harness formula --json` prints, as plain data."""
        terms = [
            {**asdict(term), "size": str(term.size), "size_in_dimensions": self.spelled(term)}
            for term in self.terms.terms
        ]
        return {
            "micro_batch_size": self.point.micro_batch_size,
            "seq_len": self.point.seq_len,
            "simulated_at": [list(point) for point in self.piece.points],
            "exact": self.exact,
            "range": self.range,
            "peak_phase": self.terms.phase,
            "peak_allocated_bytes": self.terms.total_bytes,
            "dimensions": self.dimensions,
            "terms": terms,
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        rows, tokens = self.point
        spelled = [self.spelled(term) for term in self.terms.terms[:SHOWN]]
        used = set(re.findall("[A-Z]", " ".join(spelled)))
        yield f"{self.name}: what is allocated at the peak, in {self.terms.phase}"
        yield f"  B = micro_batch_size, here {rows:,}; S = seq_len, here {tokens:,}; " + ", ".join(
            f"{letter} = {size:,}" for letter, size in self.dimensions.items() if letter in used
        )
        yield ""
        for term, of_one in zip(self.terms.terms, spelled, strict=False):
            size = f"{in_gib(term.rounded_bytes):>10}"
            times = f"{term.count:>5,} × " if term.count > 1 else " " * 8
            yield f"  {size} {times}{of_one:<24} {term.category}"
            module = term.module.removeprefix("base_model.model.")
            yield f"  {'':>10} {'':>8}{' '.join(part for part in (module, term.operator) if part)}"
        rest = self.terms.terms[SHOWN:]
        if rest:
            size, largest = (
                in_gib(n) for n in (sum(term.rounded_bytes for term in rest), rest[0].rounded_bytes)
            )
            yield f"  {size:>10} {'':>8}{len(rest)} more terms, the largest {largest}"
        yield f"  {in_gib(self.terms.total_bytes):>10} {'':>8}together, in blocks of 512 bytes"
        yield ""
        yield f"  {self.range}"


def derive(recipe: Recipe, hardware: Hardware, name: str = "recipe") -> DerivedFormula:
    """The formula at the recipe's sizes. It is exact from these up to larger ones, if the step makes the same
    requests there. A model whose layers repeat is simulated with few of them, and at the recipe's sizes with
    all. Raises InputError for a recipe that cannot be simulated."""
    return few_layers_first(lambda few: _derive(Simulations(hardware, few_layers=few), recipe, name))


def _derive(simulations: Simulations, recipe: Recipe, name: str) -> DerivedFormula:
    """The same, by these simulations. Raises NotRepeated as Simulations.confirm does."""
    formula, point = simulations.formula(recipe), point_of(recipe)
    for other in _points(point):
        known = formula.knowing(point)
        if known is not None and known.sure and any(map(known.knows, _next_to(point))):
            break
        try:
            simulations.simulate(recipe.model_copy(update=other._asdict()))
        except InputError:
            if other == point:
                raise  # the recipe itself, and not one with larger sizes
    simulations.confirm(recipe)
    simulations.keep()
    piece = formula.knowing(point)
    assert piece is not None
    letters, terms = dimensions(recipe) | heads(recipe), terms_at_peak(piece, point)
    return DerivedFormula(point, piece, terms, letters, piece.sure, name, recipe.dp_shard)


def _next_to(point: Point) -> list[Point]:
    """What a formula that is exact around `point` knows one of."""
    rows = point.micro_batch_size + (point.micro_batch_size > 1)
    return [Point(rows, point.seq_len + step) for step in (64, -64)]


def _points(point: Point) -> list[Point]:
    """The points to simulate, until the formula is sure: `point`, one where both sizes are larger, and some
    between; then nearer ones, in case the far ones make other requests; then shorter ones, in case the model
    takes no longer sequences. A micro batch of one row makes other requests than all others, since it needs
    no masks: then only the sequence varies."""
    rows, tokens = point
    lengths = [tokens * 4, tokens + 64, tokens * 2, tokens * 3 // 2, tokens // 2, tokens - 64]
    many = [rows * 4, rows + 1, rows * 2 + 1, rows + 2, rows * 2, rows + 3]
    others = zip([1] * len(lengths) if rows == 1 else many, lengths, strict=True)
    return [point, *(Point(rows, tokens) for rows, tokens in others if tokens > 0)]


def dimensions(recipe: Recipe) -> dict[str, int]:
    """The model's dimensions by the letters of MEANINGS, each different number once, but for experts: they
    stand beside other dimensions."""
    config = decoder_config(read_config(find_config(recipe.model)))
    found = {letter: config[name] for name, letter in LETTERS.items() if isinstance(config.get(name), int)}
    if "n_embd" in config and "F" not in found:  # GPT-2's, where its config says nothing else
        found["F"] = config.get("n_inner") or 4 * config["n_embd"]
    number = _heads(config)
    of_heads: dict[str, int] = {}
    if "H" in found and number is not None:
        head = config.get("head_dim") or found["H"] // number
        keys = config.get("num_key_value_heads")
        keys = keys if isinstance(keys, int) and keys else number  # some configs list them by layer
        found |= {"Q": number * head, "K": keys * head}
        of_heads = {"D": head} | ({"A": (number + 2 * keys) * head} if keys != number else {})
    if not recipe.trains_base:
        found["R"] = recipe.lora_rank
    found |= of_heads
    sizes = list(found.values())
    return {
        name: size for n, (name, size) in enumerate(found.items()) if name in "XT" or size not in sizes[:n]
    }


def heads(recipe: Recipe) -> dict[str, int]:
    """The number of attention heads of a layer by the letter N; empty where the config has none."""
    found = _heads(decoder_config(read_config(find_config(recipe.model))))
    return {} if found is None else {"N": found}


def spelling(letters: dict[str, int], piece: Piece) -> dict[str, int]:
    """The letters to spell sizes of `piece` with: S too where it was seen at one length, which then is in the
    coefficients, and B where it was seen at one micro batch of several rows."""
    rows, lengths = ({*sizes} for sizes in zip(*piece.points, strict=True))
    of_rows = {"B": rows.pop()} if len(rows) == 1 and 1 not in rows else {}
    return of_rows | ({"S": lengths.pop()} if len(lengths) == 1 else {}) | letters


def spell(term: Term, letters: dict[str, int], *, of_tokens: bool, gpus: int) -> str:
    """The size of one allocation of `term` with these letters; what holds no tokens may be divided."""
    parts = 1 if of_tokens else gpus
    return in_dimensions(
        term.size, letters, term.widths, of_tokens=of_tokens, parts=parts, expected=term.expected
    )


def _heads(config: dict[str, Any]) -> int | None:
    found = config.get("num_attention_heads", config.get("n_head"))
    return found if isinstance(found, int) else None


SORTS = {"V": "logits", "F": "activations of an MLP", "H": "hidden states"}
"""By letter: what a tensor is that has so many numbers for each token."""


def tensor_in_words(recipe: Recipe, size_bytes: int | None, phase: str) -> str | None:
    """What a tensor of this many bytes is that `phase` asked for, where exactly one sort of tensor in the
    model has them; else None. The optimizer asks for tensors like weights, and the backward pass too.

    `logits of 4 × 8,192 tokens and 128,256 words in fp32`
    """
    rows, tokens = recipe.rows, recipe.seq_len
    sizes = dimensions(recipe)
    if phase == "optimizer_step" or (phase == "backward" and size_bytes in _like_weights(recipe, sizes)):
        return None
    found = [
        f"{sort} of {rows:,} × {tokens:,} tokens and {sizes[letter]:,} "
        f"{'words' if letter == 'V' else 'numbers'} in {'fp32' if number_bytes == 4 else '16 bit'}"
        for letter, sort in SORTS.items()
        for number_bytes in (2, 4)
        if letter in sizes and rows * tokens * sizes[letter] * number_bytes == size_bytes
    ]
    return found[0] if len(found) == 1 else None


def _like_weights(recipe: Recipe, sizes: dict[str, int]) -> set[int]:
    """The bytes of trained weights: their gradients have as many, and what an optimizer keeps of them."""
    if not recipe.trains_base:
        return set()
    width = 4 if recipe.mixed or recipe.compute_dtype == "fp32" else 2
    return {sizes.get("H", 0) * size * width for size in sizes.values()}
