"""One question (a recipe on a device) and its answer as plain data, for pages that only draw. No torch.

The arithmetic answer comes in milliseconds, in a browser too; what a simulation found takes its place.
"""
# pyright: reportUnusedImport=false

from harness.ask.answer import Found, answer_of, by_arithmetic, by_formula
from harness.ask.card_table import on_every_card
from harness.ask.form import form
from harness.ask.passing_on import badge, markdown, svg
from harness.ask.question import Question, mistake, read_question
