"""`harness simulate`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from harness.allocator import allocator_settings
from harness.cli.arguments import (
    EvalAccumulationSteps,
    EvalBatches,
    EvalBatchSize,
    EvalLossOnly,
    FullStateDict,
    JsonOnStdout,
    MemorySize,
    OverridesAndHardware,
    Phases,
    RecipeName,
    asked_for,
    what_follows,
)
from harness.cli.exit_status import OUT_OF_MEMORY
from harness.cli.terminal.profile_tables import print_profile
from harness.cli.terminal.progress import Waiting
from harness.cli.terminal.terminal import Terminal, say
from harness.step_profile import explain_oom
from harness.system import complain, quiet_libraries, stdout_kept_for_json

EXAMPLES = """
Examples:
  harness simulate llama-3.1-8b-lora
  harness simulate llama-3.1-8b-lora seq_len=8192 hardware=a100-80gb --out here
  harness simulate mine --allocator expandable_segments:True --json > mine.json
  harness simulate mine --phases train,eval,save --eval-accumulation-steps 1
  harness simulate llama-3.1-8b-full-bf16 parallel=fsdp dp_shard=8 --rank 0
"""


def simulate(
    recipe: RecipeName,
    overrides: OverridesAndHardware = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for profile.json, recipe.yaml and snapshot.pickle, which the memory_viz page opens."
        ),
    ] = None,
    allocator: Annotated[
        str | None,
        typer.Option(
            help="Allocator settings, e.g. expandable_segments:True. Default: those of "
            "PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF."
        ),
    ] = None,
    phases: Phases = "train",
    eval_batches: EvalBatches = None,
    eval_batch_size: EvalBatchSize = None,
    eval_accumulation_steps: EvalAccumulationSteps = None,
    eval_loss_only: EvalLossOnly = False,
    full_state_dict: FullStateDict = False,
    memory: MemorySize = None,
    rank: Annotated[
        int,
        typer.Option(
            min=0,
            help="Which rank of the recipe's mesh (parallel, dp_replicate, dp_shard, tp): it alone is "
            "simulated. What does not divide evenly fills the first ranks: none needs more than rank 0.",
        ),
    ] = 0,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With the stacks of the largest allocations.")
    ] = False,
    as_json: JsonOnStdout = False,
) -> None:
    """Run the training step on shape-only tensors: memory to the byte and estimated time, without a GPU."""
    from harness.answers import simulated
    from harness.cli.terminal.peak import print_peak, print_verdict
    from harness.kernel_time import slow_host
    from harness.run_folder import RunFolder

    name, loaded, hardware = asked_for(recipe, overrides, memory)
    how = eval_batches, eval_batch_size, eval_accumulation_steps, eval_loss_only, full_state_dict
    after = what_follows(loaded, phases, *how)
    settings = allocator_settings(os.environ, allocator)
    folder = RunFolder(out, name, loaded) if out is not None else None
    with stdout_kept_for_json(as_json):
        quiet_libraries()
        of_rank = f", rank {rank} of {loaded.world_size}" if loaded.distributed else ""
        what = f"a step of {name} on {hardware.datasheet.title}{of_rank}, without data"
        with Waiting(Terminal(stderr=True), what):
            # written before it is printed, which ends where the reader of stdout does, as `head`
            profile = simulated(name, loaded, hardware, settings, folder=folder, rank=rank, after=after)
        people = Terminal(stderr=as_json)
        print_verdict(people, name, profile)
        print_profile(people, profile)
        say(people, "")
        print_peak(people, profile, verbose=verbose)
        say(people, f"time is an estimate, kernel by kernel: {profile.provenance['calibration']}")
        if (times := slow_host(hardware)) > 1:
            say(
                people,
                f"its range ends where a host would that takes {times:g} times as long, if that is longer",
            )
        if folder is not None:
            say(people, f"run folder: {folder.path}", whole=True)
    if as_json:
        print(profile.to_json())
    if profile.oom is not None:
        raise typer.Exit(complain(explain_oom(profile), OUT_OF_MEMORY))
