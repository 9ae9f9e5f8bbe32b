"""Where the tests find the checkout and their own data."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
MODELS = TESTS / "models"
LLAMA = MODELS / "llama.json"
RECORDINGS = TESTS / "recordings"
