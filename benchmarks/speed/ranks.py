"""What the simulation of one rank costs, as a whole command: 512 ranks cost what one costs.

Bars, on two cores: rank 0 of 8 of an 8B model in 10 s, rank 0 of 512 of a 405B model in 60 s, in 4 GiB.

    python -m benchmarks.speed.ranks [--runs N] [--out FILE]
"""

from benchmarks.speed.commands import GIB, main

FULL = ("simulate", "llama-3.1-8b-full-bf16", "parallel=fsdp", "hardware=h100", "--rank", "0", "--json")
LARGE = ("model=llama-3.1-405b", "gradient_checkpointing=true")
CASES = {
    "8B on 8": ((*FULL, "dp_shard=8"), 10.0),
    "8B on 512": ((*FULL, "dp_shard=512"), 10.0),
    "405B on 512": ((*FULL, "dp_shard=512", *LARGE), 60.0),
}

if __name__ == "__main__":
    main(str(__doc__), CASES, 4 * GIB)
