"""The commands. Nothing heavy is imported at the top: `harness --help` answers at once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import click
import typer

from harness.errors import HarnessError

INTERRUPTED = 130
OUT_OF_MEMORY = 3

app = typer.Typer(
    name="harness",
    help="How much GPU memory and time does this fine-tuning recipe take, and where does each byte and "
    "millisecond go?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(help="List the recipes, or show one fully resolved.", invoke_without_command=True)
app.add_typer(recipes_app, name="recipes")

RecipeArgument = Annotated[str, typer.Argument(help="A name in recipes/, or a path to a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value ...]", help="Fields to change, e.g. seq_len=4096.")
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one StepProfile as JSON on stdout, all else on stderr.")
]


@app.command()
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: profiles/runs/<recipe>-<time>.")
    ] = None,
    as_json: Json = False,
    snapshot: Annotated[bool, typer.Option(help="Record memory history and write snapshot.pickle.")] = True,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: the GPU if there is one.")] = None,
) -> None:
    """Run a recipe on this machine and record where the bytes and milliseconds went."""
    from rich.console import Console

    from harness.console import RunProgress, print_profile
    from harness.recipe_file import load_recipe
    from harness.run_folder import RunFolder

    name, loaded = load_recipe(recipe, overrides or [])
    folder = RunFolder(out, name, loaded)
    people = Console(stderr=True) if as_json else Console()
    _quiet_libraries()
    from harness.measure import RECORDED_STEPS, chosen_device, measure

    where = chosen_device(device)
    people.print(f"{name} on {where}: {loaded.model}, setting up", markup=False, highlight=False)
    total = loaded.warmup_steps + loaded.steps + RECORDED_STEPS
    with RunProgress(Console(stderr=True), total) as progress:
        profile = measure(loaded, folder, progress, where, snapshot=snapshot)
    if as_json:
        print(profile.to_json())
    print_profile(people, profile)
    people.print(f"run folder: {folder.path}", markup=False, highlight=False, soft_wrap=True)
    if profile.oom is not None:
        raise typer.Exit(_report_oom(profile))
    if not profile.complete:
        done = len(profile.step.loss or [])
        _complain(f"interrupted after {done} of {total} steps; the profile is marked incomplete")
        raise typer.Exit(INTERRUPTED)


@recipes_app.callback()
def recipes(context: typer.Context) -> None:
    """List the recipes, one line each."""
    if context.invoked_subcommand is None:
        from harness.recipe_file import list_recipes

        listed = list_recipes()
        width = max(len(name) for name, _ in listed)
        for name, description in listed:
            print(f"{name:{width}}  {description}")


@recipes_app.command("show")
def recipes_show(name: RecipeArgument, overrides: Overrides = None) -> None:
    """Print a recipe with every field, as YAML that can be run again."""
    from harness.recipe_file import load_recipe, recipe_yaml

    print(recipe_yaml(load_recipe(name, overrides or [])[1]), end="")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a recipe, for editors."""
    from harness.recipe_file import recipe_schema

    print(json.dumps(recipe_schema(), indent=1))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check GPU, driver, versions, and which toggles can work here (each by trying it)."""
    from rich.console import Console

    _quiet_libraries()
    from harness.doctor import examine, print_findings

    findings = examine()
    if as_json:
        print(json.dumps(findings, indent=1))
    else:
        print_findings(Console(), findings)


def main() -> NoReturn:
    """Entry point.

    Exit status: 0 fine, 2 bad input or impossible here, 3 out of memory, 130 interrupted, 1 a bug.
    """
    try:
        status = app(standalone_mode=False)
    except HarnessError as error:
        _complain(str(error))
        status = error.exit_status
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _complain("interrupted")
        status = INTERRUPTED
    except BrokenPipeError:  # the reader of our stdout (head, less) left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status if isinstance(status, int) else 0)


def _report_oom(profile: object) -> int:
    from harness.oom import explain

    _complain(explain(profile))  # type: ignore[arg-type]
    return OUT_OF_MEMORY


def _complain(message: str) -> None:
    print(f"harness: {message}", file=sys.stderr)


def _quiet_libraries() -> None:
    """Keep the libraries' notices out of our output; errors still show. Never fetch kernels from the Hub."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("BITSANDBYTES_NOWELCOME", "1")
    os.environ["USE_HUB_KERNELS"] = "NO"
    import warnings

    warnings.filterwarnings("ignore", category=UserWarning, module=r"bitsandbytes|transformers|peft|torch")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"bitsandbytes|transformers|peft|torch")
