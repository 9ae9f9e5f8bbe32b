"""What a page asks and gets, as text and plain data: an answer, what is wrong, or that nobody knows."""

import json
import tempfile
from pathlib import Path
from typing import Any

from harness.architecture import MAX_CONFIG_BYTES
from harness.ask.answer import by_arithmetic, by_formula
from harness.ask.question import HANDED, Question, mistake, read_question
from harness.errors import InputError
from harness.fit import compare_hardware
from harness.units import in_gib


def on_every_card(question: Question) -> list[dict[str, Any]]:
    """What `harness hardware --quick` lists, for reading: those that fit first, the fastest first. Raises
    InputError for a model that arithmetic does not know."""
    return [
        {
            "name": offer.name,
            "title": offer.title,
            "memory": in_gib(offer.memory_bytes),
            "needs": in_gib(offer.required_bytes),
            "fits": offer.fits,
            "reason": offer.reason,
            "tokens_per_s": "-" if offer.tokens_per_s is None else f"{offer.tokens_per_s:,.0f}",
        }
        for offer in compare_hardware(question.recipe, {}, by_arithmetic=True)
    ]


Document = dict[str, Any]


def arithmetic(text: str) -> Document:
    """In milliseconds: the answer by arithmetic; `error` and `fixes` for a question that is none; `unknown`
    for a model that arithmetic does not know."""
    try:
        question = read_question(text)
    except InputError as error:
        return mistake(text, error)
    try:
        return by_arithmetic(question)
    except InputError as error:
        return {"unknown": str(error), "said": question.as_said()}


def formula(text: str) -> Document:
    """The exact `answer`, where a formula is at hand; else nothing."""
    try:
        found = by_formula(read_question(text))
    except InputError as error:
        return mistake(text, error)
    return {} if found is None else {"answer": found, "over": True}


def cards(text: str) -> Document:
    """Every card of the table."""
    try:
        return {"cards": on_every_card(read_question(text))}
    except InputError as error:
        return mistake(text, error)


def answered_as_json(what: str, text: str) -> str:
    """One of these by name, for a page that runs this very code (harness/report/assets/ask_worker.js); or
    `config`, the text of a config.json, which is kept where a question may name it: its `path`."""
    if what == "config":
        path = Path(tempfile.mkdtemp(prefix=HANDED), "config.json")
        path.write_text(text[: MAX_CONFIG_BYTES + 1], encoding="utf-8")
        return json.dumps({"path": str(path)})
    return json.dumps({"arithmetic": arithmetic, "formula": formula, "cards": cards}[what](text))
