"""Part "predict": napkin's and the simulation's profiles of the recipes that "validate" measures.

Made on the same machine because library versions are part of a configuration, and the simulation runs the
libraries. The GPU has no part in it.
"""

from benchmarks.gpu_programme.recipes import VALIDATE, Spec
from benchmarks.gpu_programme.tasks import Context, Piece, Result, modules_of


def pieces(context: Context) -> list[Piece]:
    """One for each recipe of VALIDATE."""
    made = []
    for spec in VALIDATE:
        # Liger and flash attention need not run: only shapes do
        modules = set(modules_of(spec.recipe(tiny=context.tiny))) - {"flash_attn", "flash_attn_interface"}
        made.append(
            Piece(
                spec.name,
                predicted,
                {"spec": spec},
                tuple(sorted(modules)),
                environment={"CUDA_VISIBLE_DEVICES": ""},
            )
        )
    return made


def predicted(context: Context, spec: Spec) -> Result:
    """Both profiles, each with the recipe as measured; where there is none, the reason."""
    from benchmarks.predict import as_document, hardware_here, predictions, settings_here

    found = predictions(spec.recipe(tiny=context.tiny), hardware_here(context), settings_here())
    profiles = {name: as_document(it) for name, it in found.items() if not isinstance(it, Exception)}
    reasons = {name: f"{type(it).__name__}: {it}" for name, it in found.items() if isinstance(it, Exception)}
    return {"profiles": profiles, "reasons": reasons}
