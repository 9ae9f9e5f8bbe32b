"""What a simulation costs: wall time and resident memory of the whole command, start-up included.

Bars, on two cores: 8B LoRA in 8 s, 70B LoRA in 20 s, each in at most 2 GiB.

    python -m benchmarks.speed.simulate [--runs N] [--out FILE]
"""

from benchmarks.speed.commands import main

LORA_70B = ("llama-3.1-8b-lora", "model=llama-3.1-70b")
CASES = {
    "8B LoRA": (("simulate", "llama-3.1-8b-lora", "hardware=h100", "--json"), 8.0),
    "70B LoRA": (("simulate", *LORA_70B, "hardware=b200", "--json"), 20.0),
    "70B QLoRA": (("simulate", "llama-3.1-70b-qlora", "hardware=h100", "--json"), 20.0),
}

if __name__ == "__main__":
    main(str(__doc__), CASES)
