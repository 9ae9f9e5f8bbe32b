"""The documents that a page gets for a question: an answer, what is wrong with the question, or why nothing
is known. A question is a query string, and a document is plain data.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from harness.architecture import MAX_CONFIG_BYTES
from harness.ask.answer import by_arithmetic, by_formula
from harness.ask.question import HANDED, mistake, read_question
from harness.errors import InputError
from harness.fit import compare_hardware
from harness.units import in_gib

Document = dict[str, Any]
"""A document: `answer`, or `error` with `fixes`, or `unknown`, or `cards`."""


def arithmetic(text: str) -> Document:
    """The answer by arithmetic, in milliseconds; `error` and `fixes` for a text that is no question;
    `unknown` for a model that arithmetic does not know."""
    try:
        question = read_question(text)
    except InputError as error:
        return mistake(text, error)
    try:
        return by_arithmetic(question)
    except InputError as error:
        return {"unknown": str(error), "said": question.as_said()}


def formula(text: str) -> Document:
    """The simulated `answer` from a formula; an empty document where no formula covers the question."""
    try:
        found = by_formula(read_question(text))
    except InputError as error:
        return mistake(text, error)
    return {} if found is None else {"answer": found, "over": True}


def cards(text: str) -> Document:
    """What `harness hardware --quick` lists, with numbers as text: the devices that fit, the fastest first,
    and then the others."""
    try:
        offers = compare_hardware(read_question(text).recipe, {}, by_arithmetic=True)
    except InputError as error:
        return mistake(text, error)
    shown = [
        {
            "name": offer.name,
            "title": offer.title,
            "memory": in_gib(offer.memory_bytes),
            "needs": in_gib(offer.required_bytes),
            "fits": offer.fits,
            "reason": offer.reason,
            "tokens_per_s": "-" if offer.tokens_per_s is None else f"{offer.tokens_per_s:,.0f}",
        }
        for offer in offers
    ]
    return {"cards": shown}


def answered_as_json(what: str, text: str) -> str:
    """The document that `what` names (arithmetic, formula or cards) for the question `text`, as JSON, for a
    page that runs this very code in the browser (harness/report/assets/ask_worker.js).

    With `what` = config, `text` is that of a config.json. It is written to a new folder, and `path` is the
    file, which a question may then name as its model."""
    if what == "config":
        path = Path(tempfile.mkdtemp(prefix=HANDED), "config.json")
        path.write_text(text[: MAX_CONFIG_BYTES + 1], encoding="utf-8")
        return json.dumps({"path": str(path)})
    return json.dumps({"arithmetic": arithmetic, "formula": formula, "cards": cards}[what](text))
