"""The commands. Nothing heavy is imported at the top: `harness --help` answers at once."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from harness import cli_estimate, cli_report, cli_simulate, cli_snapshot, cli_sweep, interruption
from harness.cli_streams import complain, quiet_libraries, stdout_kept_for_json
from harness.errors import HarnessError, MissingDependency

if TYPE_CHECKING:
    from harness.step_profile import StepProfile

OUT_OF_MEMORY = 3
NOT_FINITE = 4
INTERRUPTED = interruption.CTRL_C_STATUS

app = typer.Typer(
    name="harness",
    help="How much GPU memory and how much time does this fine-tuning recipe take, and where does each "
    "byte and each millisecond go?",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(help="List the recipes, or show one fully resolved.", invoke_without_command=True)
app.add_typer(recipes_app, name="recipes")

RecipeArgument = Annotated[
    str, typer.Argument(help="A name in recipes/ (`harness recipes` lists them), or the path of a YAML file.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Fields to change, e.g. seq_len=4096.", show_default=False),
]

RUN_EXAMPLES = """
Examples:

  harness run smoke

  harness run llama-3.2-1b-bf16 seq_len=4096 gradient_checkpointing=true

  harness run mine.yaml steps=20 --json > mine.json

  harness run mine.yaml steps=1000 checkpoint_every=100 --out here

  harness run mine.yaml steps=1000 checkpoint_every=100 --resume here

Exit status: 0 fine; 2 bad input or impossible here; 3 out of memory;

4 stopped by a nan or infinite loss; 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP; 1 a bug.

All but 1 and 2 leave a profile.
"""


@app.command(epilog=RUN_EXAMPLES)
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for profile.json, recipe.yaml, log.jsonl and snapshot.pickle. "
            "Default: profiles/runs/<recipe>-<time>, or the folder that is resumed.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Go on after the last checkpoint in this run folder (recipe: checkpoint_every). The recipe "
            "is the same: only steps, warmup_steps, checkpoint_every and on_nan may change.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the profile as JSON on stdout, everything else on stderr.")
    ] = False,
    snapshot: Annotated[
        bool, typer.Option(help="Write snapshot.pickle (on a GPU: record the memory history).")
    ] = True,
    device: Annotated[
        str | None,
        typer.Option(
            help="cuda, cuda:1, ... or cpu. Default: the first GPU, else the CPU.", show_default=False
        ),
    ] = None,
) -> None:
    """Run a recipe on this machine and record where the bytes and milliseconds went."""
    from harness.console import RunProgress, Terminal, print_profile
    from harness.recipe_file import load_recipe
    from harness.run_folder import RunFolder

    name, loaded = load_recipe(recipe, overrides or [])
    folder = RunFolder(out, name, loaded, resume)
    with stdout_kept_for_json(as_json):
        quiet_libraries()
        from harness.host_memory import check_host_memory
        from harness.measure import RECORDED_STEPS, chosen_device, measure
        from harness.oom import advise

        where = chosen_device(device)
        unchecked = check_host_memory(loaded, where.type)
        total = loaded.warmup_steps + loaded.steps + RECORDED_STEPS
        with RunProgress(Terminal(stderr=True), total) as progress:
            warnings = [unchecked] if unchecked else []
            profile = measure(
                loaded, folder, progress, where, snapshot=snapshot, advise=advise, warnings=warnings
            )
        people = Terminal(stderr=as_json)
        people.print(f"{name}: {loaded.model} on {where}", markup=False, highlight=False, soft_wrap=True)
        print_profile(people, profile)
        people.print(f"run folder: {folder.path}", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print(profile.to_json())
    raise typer.Exit(_status(profile, total))


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
    """Check GPU, driver, versions, and which toggles can work here, each by trying it."""
    from harness.console import Terminal

    with stdout_kept_for_json(as_json):
        quiet_libraries()
        from harness.doctor import examine, print_findings

        with Terminal(stderr=True).status("trying every toggle on a tiny model"):
            findings = examine()
        if not as_json:
            print_findings(Terminal(), findings)
    if as_json:
        print(json.dumps(findings, indent=1))


def main() -> NoReturn:
    """Entry point.

    Exit status: 0 fine, 2 bad input or impossible here, 3 out of memory, 4 a nan or infinite loss, 130
    interrupted (143 by SIGTERM, 129 by SIGHUP), 1 a bug.
    """
    try:
        with interruption.interruptible():
            # not app(): typer would turn an interrupt and a closed pipe into statuses of its own
            command = typer.main.get_command(app)
            with command.make_context("harness", sys.argv[1:] or ["--help"]) as context:
                command.invoke(context)
        status = 0
        sys.stdout.flush()
    except typer.Exit as ended:
        status = ended.exit_code
    except HarnessError as error:
        status = complain(str(error), error.exit_status)
    except typer.TyperException as error:  # an unknown command or option, a missing argument
        context = getattr(error, "ctx", None)
        help_command = f"{context.command_path} --help" if context else "harness --help"
        message = error.format_message()
        end = "" if message.endswith((".", "?")) else "."
        status = complain(f"{message}{end}{_as_field(error)} See `{help_command}`.", 2)
    except ModuleNotFoundError as error:
        if not error.name or "." in error.name:  # part of a package that is there: a bug, ours or theirs
            raise
        status = complain(str(MissingDependency(error.name, None, "this")), MissingDependency.exit_status)
    except KeyboardInterrupt:
        status = complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of our stdout (head, less) left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(interruption.interrupted_status() if status == INTERRUPTED else status)


def script() -> NoReturn:
    """main() in a process that is over after it: what `harness` and `python -m harness` run."""
    from harness.garbage import end_process

    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without our signs spells them
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main()
    except SystemExit as ended:
        end_process(ended.code if isinstance(ended.code, int) else 1)


def _as_field(error: typer.TyperException) -> str:
    """For --seq-len 512: how fields of a recipe, and the device, are written."""
    from harness.recipe import Recipe

    name = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
    context = getattr(error, "ctx", None)
    taken = [parameter.metavar or "" for parameter in context.command.params] if context else []
    known = name in Recipe.model_fields or (name == "hardware" and any("hardware=" in text for text in taken))
    return f" Write {name}=VALUE, without dashes." if known and any("=" in text for text in taken) else ""


def _status(profile: StepProfile, total_steps: int) -> int:
    """The exit status of a run, after saying what went wrong."""
    if profile.oom is not None:
        from harness.oom import explain

        return complain(explain(profile), OUT_OF_MEMORY)
    wrong = profile.not_finite
    if wrong is not None and not profile.complete:
        last = wrong.checkpoint or "none (recipe: checkpoint_every)"
        return complain(
            f"stopped: {wrong.in_words()} of {total_steps}. {wrong.origin_in_words()} "
            f"The last good checkpoint: {last}. "
            "A lower learning_rate, max_grad_norm or precision=bf16 may help; "
            "on_nan=continue goes on and records it. The profile so far is marked incomplete",
            NOT_FINITE,
        )
    if not profile.complete:
        done = len(profile.step.loss or [])
        return complain(
            f"interrupted after {done} of {total_steps} steps; the profile so far is marked incomplete",
            INTERRUPTED,
        )
    return 0


cli_estimate.register(app)
cli_report.register(app)
cli_simulate.register(app)
cli_snapshot.register(app)
cli_sweep.register(app)
