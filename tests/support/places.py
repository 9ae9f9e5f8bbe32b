"""Where the tests find the checkout and their own data."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
MODELS = TESTS / "models"
LLAMA = MODELS / "llama.json"
RECORDINGS = TESTS / "recordings"


def open_below(folder: Path) -> list[Path]:
    """What of `folder` this process has open; nothing where a system does not say."""
    numbers = Path("/proc/self/fd")
    files = [number.resolve() for number in numbers.iterdir()] if numbers.is_dir() else []
    return [file for file in files if file.is_relative_to(folder.resolve())]
