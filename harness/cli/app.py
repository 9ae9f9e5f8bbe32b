"""The command `harness` with all its commands. It imports nothing heavy, so that `harness --help` is fast."""

import errno
import os
import sys
from functools import cache
from typing import Annotated, NoReturn

import typer

from harness.cli.arguments import paragraphs
from harness.cli.estimates import calibrate, fit, hardware, recipes, simulate, terms
from harness.cli.exit_status import INTERRUPTED
from harness.cli.running import doctor, emulate, run, sweep, validate, watch
from harness.cli.showing import diff, report, servers, snapshot
from harness.errors import HarnessError, MissingDependency
from harness.system import complain, interrupted_status, interruptible, signals_answered

COMPLETE = "_HARNESS_COMPLETE"
"""The variable of the environment by which a shell asks for completions, as typer names it."""
_commands = cache(typer.main.get_command)  # made once for a process that calls main() often, as tests do


def _print_version(given: bool) -> None:
    if given:
        from importlib.metadata import version

        print(f"harness {version('finetune-harness')}")
        raise typer.Exit


app = typer.Typer(
    name="harness",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def harness(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """How much GPU memory and how much time does this fine-tuning recipe take, and where does each byte and
    each millisecond go?
    """


app.add_typer(recipes.app, name="recipes")
app.command(epilog=paragraphs(run.EXAMPLES))(run.run)
app.command()(recipes.models)
app.command()(recipes.schema)
app.command(epilog=paragraphs(emulate.EXAMPLES), context_settings={"ignore_unknown_options": True})(
    emulate.emulate
)
app.command(epilog=paragraphs(emulate.CHECKPOINT_EXAMPLES))(emulate.checkpoint)
app.command()(doctor.doctor)
app.command(epilog=paragraphs(terms.NAPKIN_EXAMPLES))(terms.napkin)
app.command(epilog=paragraphs(terms.FORMULA_EXAMPLES))(terms.formula)
app.command(epilog=paragraphs(fit.EXAMPLES))(fit.fit)
app.command(epilog=paragraphs(hardware.EXAMPLES))(hardware.hardware)
app.command(epilog=paragraphs(calibrate.EXAMPLES))(calibrate.calibrate)
app.command(epilog=paragraphs(terms.SHARD_EXAMPLES))(terms.shard)
app.command(epilog=paragraphs(report.EXAMPLES))(report.report)
app.command(epilog=paragraphs(simulate.EXAMPLES))(simulate.simulate)
app.command(epilog=paragraphs(validate.EXAMPLES))(validate.validate)
app.command(epilog=paragraphs(diff.EXAMPLES))(diff.diff)
app.add_typer(snapshot.app, name="snapshot")
app.command(epilog=paragraphs(sweep.EXAMPLES))(sweep.sweep)
app.command()(servers.serve)
app.command(epilog=paragraphs(watch.EXAMPLES), context_settings={"ignore_unknown_options": True})(watch.watch)
app.command(epilog=paragraphs(servers.MCP_EXAMPLES))(servers.mcp)


def main() -> NoReturn:
    """Run the command that sys.argv names, and exit.

    The exit status is 0 if all is well, 2 for bad input or what is impossible here, 3 for out of memory, 4
    for a nan or infinite loss, 130 for an interrupt (143 by SIGTERM, 129 by SIGHUP), and 1 for a bug; some
    commands have more.
    """
    with signals_answered():
        try:
            interruptible(_command)
            status = 0
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
            if not error.name or "." in error.name:  # the package is installed, and lacks a module: a bug
                raise
            needed = MissingDependency(error.name, None, "this")
            status = complain(str(needed), MissingDependency.exit_status)
        except KeyboardInterrupt:
            status = complain("interrupted", INTERRUPTED)
        except BrokenPipeError:  # the reader of our stdout (head, less) left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = 0
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG or not isinstance(error.filename, str):
                raise
            status = complain(f"{error.filename[:60]}...: no file has so long a name. Give a shorter one.", 2)
        sys.exit(interrupted_status() if status == INTERRUPTED else status)


def _command() -> None:
    """Run the command, with nothing caught."""
    if COMPLETE in os.environ:
        app(prog_name="harness")
    # app() would turn an interrupt and a closed pipe into exit statuses of typer's own
    command = _commands(app)
    with command.make_context("harness", sys.argv[1:] or ["--help"]) as context:
        command.invoke(context)
    sys.stdout.flush()


def _as_field(error: typer.TyperException) -> str:
    """For an unknown option that is a recipe's field or the device, such as --seq-len: how to write it."""
    from harness.recipe import Recipe

    name = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
    name = "hardware" if name in ("gpu", "device") else name  # options of run, watch and emulate
    context = getattr(error, "ctx", None)
    metavars = [parameter.metavar or "" for parameter in context.command.params] if context else []
    takes_device = any("hardware=" in metavar for metavar in metavars)
    known = name in Recipe.model_fields or (name == "hardware" and takes_device)
    return f" Write {name}=VALUE, without dashes." if known and any("=" in text for text in metavars) else ""
