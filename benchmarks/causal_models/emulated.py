"""On the virtual GPU: the steps of a list of rows, each in a process of its own. Started by __main__.py."""

import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from benchmarks.causal_models.steps import emulate
from benchmarks.gpu_programme.tasks import Context, Piece, import_libraries, prepare_process, run_pieces

LIMIT_S = 300.0


def main() -> int:
    """Reads rows (name, config, method, trace) from standard input; a line of JSON for each is the answer."""
    prepare_process("cuda")
    context = Context("cuda", False, Path())
    import_libraries(context)
    rows = json.load(sys.stdin)
    begun = (
        find_spec("torchao") is not None
    )  # which transformers imports, and which begins CUDA: no fork then
    pieces = [Piece(row.pop("name"), emulate, row, limit_s=LIMIT_S, new_interpreter=begun) for row in rows]
    for result in run_pieces(pieces, context, "fork", until_s=time.monotonic() + LIMIT_S * len(pieces)):
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
