"""What follows from few layers of a model, held against a simulation of all of them, request by request.

  python -m benchmarks.few_layers

For each model that comes with harness, with LoRA and checkpointing on an H100: whether its layers repeat,
whether the requests that follow from few of them are those of all in order, sizes and lifetimes, and how many
times as long a simulation with all layers takes, in seconds of the processor: as what it takes to know the
first size, and to know another one. Writes profiles/few_layers.json, which docs/formula.md quotes.
"""

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of
from harness.allocator import parse_settings
from harness.architecture import with_attention
from harness.errors import InputError
from harness.fit.few_layers import FewLayers
from harness.formula import Piece, point_of
from harness.hardware import find_hardware
from harness.recipe import Recipe, list_models
from harness.simulate import import_everything, simulate_for_devices
from harness.system import installed_version, provenance, quiet_libraries, write_whole

OUT = Path("profiles/few_layers.json")
H100 = find_hardware("h100")


def held(model: str) -> dict[str, Any]:
    """One model. `equal` is None where all of its layers have to be simulated."""
    recipe = Recipe(model=model, adapter="lora", gradient_checkpointing=True, seq_len=1024)
    recipe = with_attention(recipe)
    settings = parse_settings("", installed_version("torch") or "")
    import_everything(recipe)
    simulate_for_devices(recipe, [H100], settings)  # what is imported and looked up once
    few_layers = FewLayers([H100], settings)
    moments = [time.process_time()]
    few = few_layers.simulated(recipe, timed=False)
    moments.append(time.process_time())
    other = few_layers.simulated(recipe.model_copy(update={"seq_len": 512}), timed=False)
    moments.append(time.process_time())
    _, memory, _ = simulate_for_devices(recipe, [H100], settings)
    moments.append(time.process_time())
    first, another, whole = (after - before for before, after in itertools.pairwise(moments))
    found: dict[str, Any] = {"model": model, "requests": len(memory.log.events), "equal": None}
    if few is None or other is None:
        return found
    point = point_of(recipe)
    return found | {
        "equal": Piece.of(memory.log, point).add(Piece.of(few.log, point, whole=False)),
        "whole_over_first_time": round(whole / first, 1),
        "whole_over_another_time": round(whole / another, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.few_layers", __doc__)
    parser.add_argument("models", nargs="*", default=list_models(), help="those of harness models")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    quiet_libraries()
    rows = []
    for model in given.models:
        try:
            rows.append(held(model))
        except InputError as error:  # with all layers, too: Llama 4's router cannot be adapted
            print(f"{model}: {error}", flush=True)
            continue
        print(rows[-1], flush=True)
    versions = provenance()["versions"]
    write_whole(
        given.out, json.dumps({"hardware": "h100", "versions": versions, "models": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
