"""The answer to a question as plain data: the verdict, what fills the memory, what else fits, time, changes.

Numbers and words are those of the commands `napkin`, `fit` and `simulate`; a page adds none of its own.
"""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from html import escape
from textwrap import wrap
from typing import Any, Literal
from urllib.parse import quote

from harness.ask.form import impossible
from harness.ask.question import Question
from harness.errors import InputError
from harness.fit import Change, ConfirmedFit, Simulations, cost_in_words, fit
from harness.formula import point_of, terms_at_peak
from harness.napkin import estimate, profile, step_time
from harness.step_profile import (
    CATEGORIES,
    PHASES_BETWEEN_STEPS,
    StepProfile,
    StepStats,
    TimeStats,
    between_steps_in_words,
    is_tight,
    peak_in_words,
    verdict,
)
from harness.units import in_gib, in_ms

COLOURS = (
    *("#0072B2", "#E69F00", "#CC79A7", "#D55E00", "#56B4E9", "#009E73", "#999999", "#F0E442"),
    *("#882255", "#BBBBBB"),
)
"""The colours of the bar's parts: Okabe and Ito's and two more, as in harness/report/assets/page.js."""
VERDICTS = {"yes": ("fits", "2da44e"), "tight": ("tight", "bf8700"), "no": ("does not fit", "cf222e")}
"""The badge's word and colour (RGB, hexadecimal) for each value of an answer's `fits`."""
WIDTH, LEFT = 800, 24
"""The picture's width and its margins on the left and on the right, in SVG units."""


def markdown(answer: dict[str, Any]) -> str:
    """The answer as Markdown: the verdict, a table of its rows and of what fills the memory, the command."""
    rows = [
        ("", ""),
        ("---", "---"),
        *((row["name"], f"{row['value']} ({row['detail']})") for row in answer["rows"]),
    ]
    rows += [(part["name"], part["shown"]) for part in answer["bar"]["parts"]]
    table = "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows)
    head = f"**{answer['name']} on {answer['device']}**: {answer['verdict']}"
    return f"{head}\n\n{table}\n\n`{answer['command']}` ({answer['from']})\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def badge(answer: dict[str, Any]) -> str:
    """One line of Markdown that shows the verdict as a badge. shields.io draws it when a reader opens it."""
    word, colour = VERDICTS[answer["fits"]]
    left, right = (
        quote(text.replace("-", "--").replace("_", "__"), safe="") for text in (answer["device"], word)
    )
    return f"![{answer['name']} on {answer['device']}: {word}](https://img.shields.io/badge/{left}-{right}-{colour})"


def svg(answer: dict[str, Any]) -> str:
    """The answer as a picture of WIDTH units: the verdict, the bar of the memory, its legend and the rows."""
    bar, (_, verdict_colour) = answer["bar"], VERDICTS[answer["fits"]]
    parts: list[dict[str, Any]] = bar["parts"]
    scale = (WIDTH - 2 * LEFT) / max(bar["memory_bytes"], sum(part["bytes"] for part in parts), 1)
    out = [_text(LEFT, 36, f"{answer['name']} on {answer['device']}", 20, 600)]
    lines = wrap(answer["verdict"], 92)
    out += [_text(LEFT, 62 + 20 * n, line, 15, 400, f"#{verdict_colour}") for n, line in enumerate(lines)]
    x, y = float(LEFT), 58 + 20 * len(lines)
    for n, part in enumerate(parts):
        out.append(_rectangle(x, y, part["bytes"] * scale, 36, f'fill="{COLOURS[n % len(COLOURS)]}"'))
        x += part["bytes"] * scale
    limit = 'fill="none" stroke="#57606a" stroke-width="2"'
    out.append(_rectangle(LEFT, y, bar["memory_bytes"] * scale, 36, limit))
    y += 62
    for n, part in enumerate(parts):
        left, line = LEFT + n % 3 * 250, y + n // 3 * 22
        out.append(_rectangle(left, line - 11, 12, 12, f'fill="{COLOURS[n % len(COLOURS)]}"'))
        out.append(_text(left + 18, line, f"{part['name']} {part['shown']}", 13))
    y += 22 * ((len(parts) + 2) // 3) + 12
    for row in answer["rows"]:
        out.append(_text(LEFT, y, f"{row['name']}: {row['value']} ({row['detail']})", 13))
        y += 22
    for line in (*wrap(answer["command"], 110), answer["from"]):
        out.append(_text(LEFT, y, line, 12, 400, "#57606a"))
        y += 18
    size = f'width="{WIDTH}" height="{y}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {y}" '
        f'font-family="system-ui, sans-serif"><rect {size} fill="#ffffff"/>{"".join(out)}</svg>'
    )


def _rectangle(x: float, y: float, width: float, height: int, look: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height}" {look}/>'


def _text(x: float, y: float, text: str, size: int, weight: int = 400, colour: str = "#1b1f23") -> str:
    look = f'font-size="{size}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x:g}" y="{y:g}" {look}>{escape(text)}</text>'


Source = Literal["arithmetic", "formula", "simulated"]
"""How an answer was found."""
FROM = {
    "arithmetic": "by arithmetic: about right, at once",
    "formula": "by a formula derived from simulations: the same bytes",
    "simulated": "simulated: the training step itself, on tensors without contents",
}
"""The sentence that says where an answer comes from, for each source."""
MOST_CHANGES = 6
"""The most proposed changes that an answer lists."""
PIECES = "lies in pieces"
"""The name of the part of the bar for memory that the allocator has reserved and not allocated."""


@dataclass
class Found:
    """What `harness fit` says about a recipe: the largest sizes that fit, and changes that save memory."""

    largest: dict[str, int] = field(default_factory=dict[str, int])
    """The largest micro_batch_size and the largest seq_len that fit, by field; 0 where none fits."""
    changes: Sequence[Change] = ()
    """The single changes that save memory, in the order of what they cost."""
    together: str = ""
    """Overrides with which the recipe fits where no single change is enough; empty where none were found."""
    notes: Sequence[str] = ()
    """Sentences for the answer's notes."""
    how: str = "by arithmetic"
    """How `largest` was found, as a row of the answer says it."""
    tight: bool = False
    """Whether less memory is left free than arithmetic keeps for fragmentation."""

    @classmethod
    def seen(cls, found: ConfirmedFit) -> "Found":
        """What `harness fit` found by simulating."""
        sizes = {name: exact.value or 0 for name, exact in found.largest.items()}
        notes = [*found.notes, f"W{found.held_back.in_words[1:]}." if found.held_back else ""]
        for name, exact in found.expandable.items():
            notes.append(f"With PYTORCH_ALLOC_CONF=expandable_segments:True even {name} {exact.value} fits.")
        if found.neutral is not None:
            change, larger, slowdown = found.neutral
            cost = cost_in_words(slowdown)
            notes.append(f"With {change}, {cost}, micro_batch_size {larger} or more fits.")
        return cls(sizes, found.changes, found.together, [note for note in notes if note], "simulated")

    @classmethod
    def by_arithmetic(cls, question: Question) -> "Found":
        """What `harness fit --quick` says. Raises InputError for a model that arithmetic does not know."""
        found = fit(question.recipe, question.hardware)
        largest = {"micro_batch_size": found.micro_batch_size, "seq_len": found.seq_len}
        left = ["5% of the memory is left to the allocator's fragmentation, which arithmetic does not know."]
        tight = found.required_bytes > found.limit_bytes
        return cls(largest, found.changes, found.together, left, tight=tight)


def by_arithmetic(question: Question) -> dict[str, Any]:
    """The answer in milliseconds: what `harness napkin` and `harness fit --quick` say.

    Raises InputError for a model that arithmetic does not know."""
    memory = estimate(question.recipe, question.hardware)
    found = profile(memory)
    found.step.time_s.p10, found.step.time_s.p90 = step_time(memory).range_s
    alternatives = Found.by_arithmetic(question)
    alternatives.tight = alternatives.tight and found.oom is None
    if question.after.after:
        only_simulated = "What comes after the training steps only a simulation tells."
        alternatives.notes = [*alternatives.notes, only_simulated]
    return answer_of(question, "arithmetic", found, alternatives)


def by_formula(question: Question) -> dict[str, Any] | None:
    """The simulated bytes without a simulation, from a formula in the cache or among the shipped ones; None
    where none covers these sizes. The time is that of arithmetic unless this very step was simulated on this
    device before."""
    unlimited = without_limit(question)
    if unlimited is None:
        return None
    found = Simulations(question.hardware).profile(question.recipe)
    return answer_of(question, "formula", found, None, unlimited)


def without_limit(question: Question) -> StepProfile | None:
    """The profile of a step on a device whose memory does not run out; None where no formula covers it."""
    simulations, recipe = Simulations(question.hardware), question.recipe
    piece = simulations.formula(recipe).knowing(point_of(recipe))
    if piece is None:
        return None
    found = simulations.with_plenty(recipe)
    sizes: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for term in terms_at_peak(piece, point_of(recipe)).terms:
        sizes[term.category] += term.rounded_bytes
    for name, size_bytes in sizes.items():
        setattr(found.memory.at_peak, f"{name}_bytes", size_bytes)
    if found.step.time_s.median is None:
        found.step = _step_by_arithmetic(question)
    return found


def _step_by_arithmetic(question: Question) -> StepStats:
    """The estimated time of a step; empty for a model that arithmetic does not know."""
    try:
        memory = estimate(question.recipe, question.hardware)
    except InputError:
        return StepStats()
    time = step_time(memory)
    low, high = time.range_s
    time_s = TimeStats(median=time.seconds, p10=low, p90=high)
    return StepStats(time_s=time_s, tokens_per_s=time.tokens_per_s, bound=time.bound)


def answer_of(
    question: Question,
    source: Source,
    found: StepProfile,
    alternatives: Found | None = None,
    unlimited: StepProfile | None = None,
) -> dict[str, Any]:
    """The whole answer, as a page shows it, with its picture, its Markdown and its badge.

    `found` is the step's profile on the question's device. `alternatives` are by arithmetic where they are
    not given. `unlimited` is the profile of the step without a limit of memory, where it is known: it says
    how much a step that runs out of memory needs.
    """
    words = verdict(found)
    if alternatives is None:  # those by arithmetic, for an answer that has no simulated ones yet
        alternatives = Found()
        with suppress(InputError):
            alternatives = replace(Found.by_arithmetic(question), notes=(), tight=False)
    fits = "yes" if words.startswith("fits") else "tight" if is_tight(found) else "no"
    if unlimited is None or (source == "simulated" and found.oom is None):
        unlimited = found
    taken, memory = unlimited.memory.taken_bytes(), question.hardware.memory_bytes
    if fits == "no" and taken is not None and taken > memory:
        words += f"; it needs {in_gib(taken)}, {in_gib(taken - memory)} more than there is"
    if unlimited.step.time_s.median is None:
        unlimited = unlimited.model_copy(update={"step": _step_by_arithmetic(question)})
    answer = {
        "name": question.name,
        "device": question.hardware.datasheet.title,
        "source": source,
        "from": FROM[source],
        "fits": "tight" if alternatives.tight else fits,
        "verdict": f"{words[0].upper()}{words[1:]}.",
        "bar": {"memory_bytes": memory, "taken_bytes": taken, "parts": _parts(unlimited)},
        "rows": _rows(question, found, unlimited, alternatives),
        "changes": _changes(alternatives) if fits != "yes" or alternatives.tight else [],
        "notes": [*map(str.strip, between_steps_in_words(found)), *found.warnings, *alternatives.notes],
        "yaml": question.yaml,
        "command": question.command,
        "said": question.as_said(),
        "impossible": impossible(question.recipe),
    }
    return answer | {"svg": svg(answer), "markdown": markdown(answer), "badge": badge(answer)}


def _parts(found: StepProfile) -> list[dict[str, Any]]:
    """What fills the memory: the categories at the peak in their order, what is reserved beyond them, and
    the CUDA context. For a step that runs out of memory: what was there then, and what was asked for."""
    memory, oom, taken = found.memory, found.oom, found.memory.taken_bytes()
    sizes = {name.replace("_", " "): size or 0 for name, size in memory.at_peak.by_category().items()}
    allocated, context = sum(sizes.values()), memory.cuda_context_bytes or 0
    if oom is not None and oom.requested_bytes is not None:
        sizes |= {PIECES: oom.reserved_unallocated_bytes or 0, "asked for then": oom.requested_bytes}
    elif taken is not None:
        sizes[PIECES] = max(0, taken - allocated - context)
    sizes["CUDA context"] = context
    return [{"name": n, "bytes": size, "shown": in_gib(size)} for n, size in sizes.items() if size]


def _rows(
    question: Question, found: StepProfile, unlimited: StepProfile, alternatives: Found
) -> list[dict[str, str]]:
    """The answer's numbers: memory, the largest sizes, time and speed, each with a name and a detail."""
    recipe, memory, step = question.recipe, found.memory, unlimited.step
    taken = unlimited.memory.taken_bytes()
    rows: list[tuple[str, str, str]] = []
    steps_fit = found.oom is None or found.oom.phase in PHASES_BETWEEN_STEPS
    if steps_fit and memory.peak_allocated_bytes is not None:
        _, _, beyond = peak_in_words(found).partition(" allocated, ")
        rows.append(("peak, allocated", in_gib(memory.peak_allocated_bytes), beyond))
    elif taken is not None:
        requested = unlimited.oom.requested_bytes if unlimited.oom is not None else None
        more = f"; {in_gib(requested)} more were asked for" if requested else ""
        name = "taken when it ran out" if more else "needs"
        rows.append((name, in_gib(taken), f"with the CUDA context{more}"))
    for name, other in (("micro_batch_size", "seq_len"), ("seq_len", "micro_batch_size")):
        if name in alternatives.largest:
            value = f"{alternatives.largest[name]:,}" if alternatives.largest[name] else "none fits"
            at = f"at {other} {getattr(recipe, other):,}, {alternatives.how}"
            rows.append((f"largest {'batch' if name == 'micro_batch_size' else 'length'}", value, at))
    median, low, high = step.time_s.median, step.time_s.p10, step.time_s.p90
    if median is not None:
        width = f"{in_ms(low)} to {in_ms(high)}, " if low is not None and high is not None else ""
        rows.append(("step", in_ms(median), f"{width}an estimate"))
    if step.tokens_per_s is not None:
        each = " on each GPU" if recipe.world_size > 1 else ""
        of_step = f"{recipe.tokens_per_step:,} tokens a step{each}"
        bound = f", bound by {step.bound}" if step.bound else ""
        rows.append(("tokens/s", f"{step.tokens_per_s:,.0f}", of_step + bound))
        if question.tokens and step.tokens_per_s:
            hours = question.tokens / step.tokens_per_s / 3600
            rows.append(
                ("training", f"{hours:,.1f} hours", f"of {question.tokens:,} tokens, padding included")
            )
    return [{"name": name, "value": value, "detail": detail} for name, value, detail in rows]


def _changes(found: Found) -> list[dict[str, Any]]:
    """The proposed changes: first those that alone make the recipe fit, in the order of what they cost. Where
    none does, the changes that are enough together come first."""
    enough = [change for change in found.changes if change.fits]
    listed = [*enough, *(change for change in found.changes if not change.fits)][:MOST_CHANGES]
    rows = [
        {
            "fields": _values_by_field(change.overrides),
            "words": change.overrides,
            "fits": change.fits,
            "detail": f"{in_gib(change.saved_bytes)} less, time a token × {change.slowdown:.2f}"
            + ("" if change.same_result else ", another training")
            + (", seen to fit" if change.seen and change.fits else ", then it fits" if change.fits else ""),
        }
        for change in listed
    ]
    if found.together and not enough:
        fields = _values_by_field(found.together)
        rows.insert(0, {"fields": fields, "words": found.together, "fits": True, "detail": "together"})
    return rows


def _values_by_field(overrides: str) -> Mapping[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(overrides))
