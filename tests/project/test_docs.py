"""The guide: its links lead somewhere, its commands exist, its figures and numbers are those of its data."""

import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

from harness.recipe import EFFECTS, Recipe, check_recipe, list_recipes, load_recipe
from harness.step_profile.step_profile import StepProfile
from harness.sweep import Sweep, plan_sweep
from harness.sweep.figures import digest
from harness.system.strict_yaml import parse_yaml
from pages.links import anchors, broken_links, external_links, links
from pages.pictures import DATA, PICTURES, data_of, drawn_from, picture_of
from pages.toggles import SEVERAL_GPUS, TOGGLES, WITHOUT_SWEEP, Toggle
from tests.support.commands import Call
from tests.support.places import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


BY_MODULE = {
    "packages": "pages.map",
    "ask": "pages.ask.guide",
    "ask-phone": "pages.ask.guide",
    "cover": "harness simulate llama-3.1-8b-qlora hardware=rtx-4090 --out run",
}
"""Pictures that a module draws, and what stands above them: the module, or whose step it is."""
INDENTED = re.compile(r"^ {4}(harness .*)$", re.MULTILINE)


def commands() -> list[tuple[str, ...]]:
    """Every command in a block of the guide or of README, fenced or indented, without `harness`."""
    pages = [page.read_text().replace("\\\n", " ") for page in (*PAGES, ROOT / "README.md")]
    texts = [text for page in pages for language, text in BLOCK.findall(page) if language != "yaml"]
    lines = {line for text in texts for line in text.splitlines()}
    lines |= {line for page in pages for line in INDENTED.findall(page)}
    return sorted(
        tuple(shlex.split(line, comments=True)[1:]) for line in lines if line.startswith("harness ")
    )


def test_there_is_a_guide():
    names = {page.name for page in PAGES}
    assert names >= {"index.md", "timeline.md", "memory-words.md", "toggles.md", "recipe.md", "answers.md"}
    assert len(commands()) > len(TOGGLES)


def test_internal_links_resolve_and_external_ones_are_listed():
    assert list(broken_links(DOCS)) == []
    assert sum(len(links(page)) for page in PAGES) > 60
    assert all(address.startswith("https://") for address in external_links(DOCS))


def test_a_broken_link_is_found(tmp_path: Path):
    (tmp_path / "a.md").write_text(
        "# One\n[x](b.md) [y](b.md#two-words) [z](#one) ![p](p.png) [w](../c.md)\n"
    )
    (tmp_path / "b.md").write_text(
        "# Two Words\n```\n# not a heading [x](nothing.md)\n```\n[x](#not-a-heading)\n"
    )
    assert list(broken_links(tmp_path)) == [
        "a.md: there is no p.png",
        "a.md: there is no ../c.md",
        "b.md: b.md has no heading #not-a-heading",
    ]


def pages_of(menu: list[dict]) -> list[str]:
    """The pages of a menu and of the menus in it."""
    entries = [value for entry in menu for value in entry.values()]
    return [page for value in entries for page in (pages_of(value) if isinstance(value, list) else [value])]


def test_pages_are_in_the_menu():
    menu = parse_yaml((DOCS.parent / "mkdocs.yml").read_text().replace("|\n  *.py", "py"), "mkdocs.yml")[
        "nav"
    ]
    assert sorted(pages_of(menu)) == sorted(page.name for page in PAGES)


def test_every_figure_stands_under_the_command_that_made_it():
    shown = set()
    for page in PAGES:
        # a figure belongs to the last block of commands before it
        text, command = page.read_text(), ""
        either = r"^```\w*\n(.*?)^```$|\]\((pictures/[^)]+)\)"
        for found in re.finditer(either, text, re.MULTILINE | re.DOTALL):
            if found[1]:
                command = found[1]
            else:
                name = Path(found[2]).stem
                shown.add(found[2])
                if name in BY_MODULE:
                    assert BY_MODULE[name] in command
                    continue
                makes = "--png pictures" if name.startswith("step-") else f" {name}="
                assert makes in command, f"{page.name}: {found[2]}"
                assert "--png" in command
    assert shown | {"pictures/cover.png", "pictures/emulate.svg"} == {
        f"pictures/{path.name}" for path in PICTURES.iterdir()
    }  # README


@pytest.mark.parametrize("toggle", TOGGLES, ids=lambda toggle: toggle.field)
def test_a_figure_and_its_data_are_of_the_toggles_command(toggle: Toggle):
    sweep = Sweep.read(data_of(toggle))
    assert drawn_from(picture_of(toggle)) == digest(sweep)
    words = shlex.split(toggle.command)
    kind = "napkin" if "--napkin" in words else "simulated"
    plan = plan_sweep(words[2], [word for word in words[3:] if "=" in word], kind)
    assert sweep.complete
    assert (sweep.kind, sweep.name) == (kind, words[2])
    assert sweep.axes == plan.axes
    assert [cell.values[toggle.field] for cell in sweep.cells] == [
        cell.changes.get(toggle.field, plan.base[toggle.field]) for cell in plan.cells
    ]
    asked = {**plan.base, "data": sweep.base["data"]}
    assert {name: value for name, value in sweep.base.items() if name in asked} == {
        name: value for name, value in asked.items() if name in sweep.base
    }
    assert {cell.status for cell in sweep.cells} <= {"ok", "out_of_memory"}


def test_every_toggle_is_in_the_guide():
    """A recipe's fields but the model and those that change neither memory nor time."""
    described = {toggle.field for toggle in TOGGLES} | SEVERAL_GPUS.keys() | WITHOUT_SWEEP.keys()
    assert described == set(Recipe.model_fields) - set(EFFECTS) - {"model"}
    assert described <= anchors(DOCS / "toggles.md")


def test_numbers_are_those_of_the_data():
    """The pages' own check (test_pages.py) fills them in; this is one of them by hand."""
    assert sum(page.read_text().count("<!-- end of ") for page in PAGES) >= 3
    peak = StepProfile.read(DATA / "step.json").memory.peak_allocated_bytes or 0
    assert f"| allocated, at its peak | {peak / 2**30:.2f} GiB |" in (DOCS / "memory-words.md").read_text()


def test_pictures_are_small():
    for path in PICTURES.iterdir():
        assert path.stat().st_size < 200_000
        if path.suffix == ".svg":
            continue
        with Image.open(path) as image:
            assert image.width >= 800


def test_the_recipe_is_a_recipe():
    (text,) = [
        text for language, text in BLOCK.findall((DOCS / "recipe.md").read_text()) if language == "yaml"
    ]
    assert check_recipe(parse_yaml(text, "recipe.md"), "recipe.md").quantization == "nf4"


def test_the_commands_exist(call: Call):
    shown: dict[str, str] = {}
    shipped = {name for name, _ in list_recipes()}
    for command in commands():
        name = " ".join(command[:2] if command[0] in ("snapshot", "recipes") else command[:1])
        if name not in shown:
            status, shown[name], _ = call(*name.split(), "--help")
            assert status == 0, command
        own = command[: command.index("--")] if "--" in command else command  # the rest is another program's
        options = {word for word in own if word.startswith("--")}
        assert all(option in shown[name] for option in options), command
        if command[0] == "run" and command[1] in shipped:
            load_recipe(command[1], [word for word in own if "=" in word and not word.startswith("--")])
    assert len(shown) >= 7


RESULTS = sorted(
    path
    for folder in ("profiles", "docs", "recipes", "tests/recordings")
    for path in (ROOT / folder).rglob("*.json")
    if "runs" not in path.parts  # a run of one's own, which git ignores
)
OF_A_MACHINE = re.compile(r'"/(?:home|root|tmp|work|opt|Users|mnt|data)/[^"]*"')


def test_results_name_no_folder_of_the_machine_that_made_them():
    """Whoever reads them has another one."""
    assert len(RESULTS) > 100
    for path in RESULTS:
        assert not OF_A_MACHINE.search(path.read_text(encoding="utf-8")), path
