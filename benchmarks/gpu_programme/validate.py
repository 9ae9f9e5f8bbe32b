"""Part "validate": full-size recipes as `harness run` measures them. Part "cases": one field at a time. Part
"processes": how far the step's times of one recipe's processes are apart."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_programme.kernels import host_speed
from benchmarks.gpu_programme.recipes import CASES, HOST_BOUND, VALIDATE, Spec
from benchmarks.gpu_programme.tasks import LIGER_IS_TRITON, Context, Piece, Result, modules_of
from harness.run_folder.run_folder import RunFolder

PROCESSES = 3


def pieces(context: Context) -> list[Piece]:
    """One for each recipe of VALIDATE."""
    return [_piece(spec, context, history=True) for spec in VALIDATE]


def case_pieces(context: Context) -> list[Piece]:
    """One for each recipe of CASES. Without memory history: times and peaks are all they are for."""
    return [_piece(spec, context, history=False) for spec in CASES]


def process_pieces(context: Context) -> list[Piece]:
    """Each recipe of HOST_BOUND, in as many processes as PROCESSES says, taking turns."""
    made = []
    for number in range(1, PROCESSES + 1):
        for spec in HOST_BOUND:
            piece = _piece(spec, context, history=False)
            made.append(replace(piece, name=f"{spec.name}.process-{number}", run=step_times))
    return made


def _piece(spec: Spec, context: Context, *, history: bool) -> Piece:
    recipe = spec.recipe(tiny=context.tiny)
    reasons = {
        LIGER_IS_TRITON: recipe.loss == "fused_linear",
        "flash attention has no kernel for a CPU": recipe.attention.startswith("flash_attention"),
        "compiling takes longer than everything else together": recipe.compile,
    }
    gpu_only = next((reason for reason, applies in reasons.items() if applies), None)
    return Piece(
        spec.name, measured, {"spec": spec, "history": history}, modules_of(recipe), gpu_only=gpu_only
    )


def measured(context: Context, spec: Spec, history: bool) -> Result:
    """The recipe's measured profile, with `recipe` as the name of the file it came from says it."""
    import torch

    from benchmarks.predict import as_document
    from harness.measure import Silent, measure

    recipe = spec.recipe(tiny=context.tiny)
    with tempfile.TemporaryDirectory() as folder:
        run = _WithoutSnapshot(Path(folder) / "run", spec.name, recipe)
        profile = measure(recipe, run, Silent(), torch.device(context.device), snapshot=history)
    return {"status": "ok" if profile.oom is None else "oom", "profile": as_document(profile)}


def step_times(context: Context, spec: Spec, history: bool) -> Result:
    """The seconds of a step and of its phases in this process, medians; and how fast its host is."""
    profile = measured(context, spec, history)["profile"]
    phases = {name: phase["time_s"]["median"] for name, phase in profile["phases"].items()}
    return {
        "recipe": spec.name,
        "step_s": profile["step"]["time_s"]["median"],
        "phases_s": phases,
        **host_speed(context),
    }


class _WithoutSnapshot(RunFolder):
    """The history is recorded for what is live at the peak. Its pickle would be thrown away."""

    def write_snapshot(self, snapshot: dict[str, Any]) -> None:
        pass
