"""The arguments and options that several commands share, and what they ask for."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from harness.errors import InputError
from harness.recipe import Recipe, load_recipe, recipe_names

if TYPE_CHECKING:
    from harness.hardware import Hardware
    from harness.training import AfterStep


def _names_from(beginning: str) -> list[str]:
    """The recipes whose names begin so, for a shell that completes a name."""
    return [name for name in recipe_names() if name.startswith(beginning)]


RecipeName = Annotated[
    str,
    typer.Argument(
        help="A recipe: its name (`harness recipes` lists them) or YAML file. Or a model, for a recipe of "
        "defaults: its name (`harness models` lists them), a Hugging Face id, a config.json or its folder.",
        autocompletion=_names_from,
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Fields to change, e.g. seq_len=4096.")
]
OverridesAndHardware = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]... [hardware=NAME]",
        help="Fields to change, e.g. seq_len=4096, and the GPU (`harness hardware` lists them).",
    ),
]
MemorySize = Annotated[
    str | None,
    typer.Option(
        "--memory",
        help="Memory of the device, e.g. 16GiB or 24GB, for a card of another size or none in particular.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]
JsonOnStdout = Annotated[
    bool, typer.Option("--json", help="Print JSON on stdout, everything else on stderr.")
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        metavar="NAME",
        envvar="HARNESS_TRACK",
        help="At the end, tell an experiment tracker: tensorboard, wandb, mlflow, trackio, ... Several with "
        "commas.",
    ),
]
Phases = Annotated[
    str,
    typer.Option(
        "--phases",
        help="What to look at, by commas: train, and behind it eval (an evaluation as transformers' Trainer "
        "does it) and save (its checkpoint).",
    ),
]
EvalBatches = Annotated[
    int | None, typer.Option("--eval-batches", help="How many batches an evaluation has. Default: 10.")
]
EvalBatchSize = Annotated[
    int | None, typer.Option("--eval-batch-size", help="Their rows, per_device_eval_batch_size. Default: 8.")
]
EvalAccumulationSteps = Annotated[
    int | None,
    typer.Option(
        "--eval-accumulation-steps", help="After so many batches logits go to the host. Default: at the end."
    ),
]
EvalLossOnly = Annotated[
    bool,
    typer.Option("--eval-loss-only", help="Keep no logits: prediction_loss_only, or no compute_metrics."),
]
FullStateDict = Annotated[
    bool,
    typer.Option(
        "--full-state-dict",
        help="Where the model is divided among ranks: rank 0 gathers it and writes it whole. Default: each "
        "rank writes its part.",
    ),
]


def paragraphs(lines: str) -> str:
    """Lines as paragraphs, for the text below a command's options, whose lines typer would join."""
    return lines.replace("\n", "\n\n")


def one_of(options: dict[str, bool]) -> str | None:
    """The one of `options` that is given; None where none is. Raises InputError where several are."""
    given = [name for name, is_given in options.items() if is_given]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} exclude each other. Give one of them.")
    return given[0] if given else None


def what_follows(
    recipe: Recipe,
    phases: str,
    batches: int | None,
    batch_size: int | None,
    accumulation_steps: int | None,
    loss_only: bool,
    full_state_dict: bool,
) -> "AfterStep | None":
    """What follows the training steps, by the options above; None for nothing. Raises InputError."""
    from harness.answers import after_training

    given = {
        "--eval-batches": ("batches", batches),
        "--eval-batch-size": ("batch_size", batch_size),
        "--eval-accumulation-steps": ("accumulation_steps", accumulation_steps),
        "--eval-loss-only": ("keep_logits", False if loss_only else None),
    }
    evaluation = {option: (field, value) for option, (field, value) in given.items() if value is not None}
    return after_training(recipe, phases, evaluation, "--phases ", whole_state=full_state_dict)


def asked_for(
    recipe: str, overrides: Sequence[str] | None, memory: str | None
) -> "tuple[str, Recipe, Hardware]":
    """The recipe's name, the recipe, and the device, by the arguments above. Raises InputError, also for data
    that cannot be read."""
    from harness.data import check_data
    from harness.hardware import split_hardware

    hardware, changes = split_hardware(overrides or [], memory)
    name, loaded = asked_recipe(recipe, changes)
    check_data(loaded)
    return name, loaded, hardware


def asked_recipe(recipe: str, overrides: Sequence[str]) -> tuple[str, Recipe]:
    """The recipe's name, and the recipe with the attention that its model has. Raises InputError."""
    from harness.architecture import find_config, with_attention

    name, loaded = load_recipe(recipe, overrides)
    find_config(loaded.model)  # raises for a model that is nowhere, before torch is imported
    return name, with_attention(loaded)
