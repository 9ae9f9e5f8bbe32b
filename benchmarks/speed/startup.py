"""How long the commands take that need no torch: wall time of the whole process, start-up included.

Bars: 0.5 s for help and lists, 0.7 s for napkin.

    python -m benchmarks.speed.startup [--runs N] [--out FILE]
"""

from benchmarks.speed.commands import main

CASES = {
    "harness --help": (("--help",), 0.5),
    "harness recipes": (("recipes",), 0.5),
    "harness schema": (("schema",), 0.5),
    "harness napkin": (("napkin", "llama-3.1-70b-qlora"), 0.7),
    "harness napkin --json": (("napkin", "llama-3.1-8b-full-bf16", "--json"), 0.7),
}

if __name__ == "__main__":
    main(str(__doc__), CASES)
