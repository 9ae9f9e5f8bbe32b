"""`import harness`: its names, in whatever order and way they are imported, and what that loads."""

import inspect
import os
import pickle
import subprocess
import sys
from types import ModuleType

import pytest

import harness
from tests.support.places import ROOT

QUESTIONS = ("fit", "formula", "hardware", "napkin", "report", "simulate")
"""Those with a package of the same name."""
WAYS = (
    "import harness.fit",
    "from harness.fit import fit_lines",
    "import harness; harness.fit",
    "from harness import fit",
    "import harness.fit.search as search; search.LARGEST",
    "import harness.fit as package; package.fit_lines",
    "import harness.cli.app",
)
IN_EVERY_ORDER = """
import os, sys
import pydantic, typer, yaml  # what all children need
sys.path.insert(0, sys.argv[1])
for order in sys.argv[2:]:
    child = os.fork()
    if not child:
        for way in order.split(" | "):
            exec(way)
        import harness
        assert harness.fit is sys.modules["harness.fit"], order
        assert harness.fit("smoke", quick=True, memory="16GiB").micro_batch_size > 0, order
        from harness.fit import fit as inner
        assert inner is not harness.fit, order
        assert "torch" not in sys.modules, order
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, order
    print(order)
"""


def python(*arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_question_is_the_same_object_in_every_order_of_imports():
    orders = [" | ".join((*WAYS[n:], *WAYS[:n])) for n in range(len(WAYS))]  # each comes first once
    assert python(IN_EVERY_ORDER, str(ROOT), *orders) == orders


def test_nothing_is_loaded_before_it_is_used():
    program = (
        "import sys, harness\n"
        "print(sorted(name for name in sys.modules if name.startswith('harness')))\n"
        "harness.napkin('smoke')\n"
        "print(harness.fit('smoke', quick=True, hardware='l4').seen)\n"
        "print(*({'torch', 'transformers', 'rich', 'typer'} & {*sys.modules}))\n"
    )
    assert python(program) == ["['harness', 'harness.version']", "False", ""]


def test_every_name_is_there_and_typed():
    assert set(harness.__all__) == {*harness._LAZY, "__version__"}
    assert set(harness.__all__) <= set(dir(harness))
    for name in harness.__all__:
        assert getattr(harness, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'simulat'"):
        _ = harness.simulat  # type: ignore[attr-defined]
    source = (ROOT / "harness/__init__.py").read_text()
    typed = source.partition("if TYPE_CHECKING:")[2].partition("__version__")[0]
    assert all(f" {name}," in typed or f" {name}\n" in typed for name in harness._LAZY)
    assert (ROOT / "harness/py.typed").exists()


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_looks_like_its_function(name: str):
    question = getattr(harness, name)
    assert isinstance(question, ModuleType)
    function = getattr(sys.modules["harness.api"], name)
    assert inspect.signature(question) == inspect.signature(function)
    assert inspect.getdoc(question) == inspect.getdoc(function)
    assert pickle.loads(pickle.dumps(question)) is question


def test_a_submodule_can_be_replaced_by_its_whole_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harness.fit.search.LARGEST_MICRO_BATCH", 7)
    from harness.fit import search

    assert search.LARGEST_MICRO_BATCH == 7
