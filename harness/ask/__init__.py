"""One question (a recipe on a device) and its answer as plain data, for pages that only draw. No torch.

The answer by arithmetic comes in milliseconds, in a browser too; the simulated answer then replaces it.
"""
# pyright: reportUnusedImport=false

from harness.ask.answer import Found, answer_of, by_formula, without_limit
from harness.ask.documents import Document, answered_as_json, arithmetic, cards
from harness.ask.form import describe_form
from harness.ask.question import Question, read_question
