"""What layers that mix tokens through a state keep, in the plain PyTorch code of transformers: for each
tensor (name, dimensions, bytes of an element, source, how many of them). No torch."""

SCANS: dict[str, list[tuple[str, str, float, str, int]]] = {
    "state space": [
        ("gate, x, convolved and scaled", "B·S·Z", 4, "Mamba-2's torch_forward", 8),
        ("B and C of every head", "B·S·M·Q", 4, "Mamba-2's torch_forward", 3),
        ("decays and scores of a chunk", "B·S·M·C", 4, "Mamba-2's torch_forward", 5),
    ],
    "delta": [
        ("q, k, v, gates and norms", "B·S·Z", 4, "torch_chunk_gated_delta_rule", 14),
        ("decays and scores of a chunk", "B·S·M·C", 4, "torch_chunk_gated_delta_rule", 8),
        ("its triangular inverse, row by row", "B·S·M·C·C", 4 / 3, "torch_chunk_gated_delta_rule", 1),
    ],
    "scan": [
        ("A, B x and states of every token", "B·S·Z·Q", 4, "Mamba's slow_forward", 4),
        ("gate, x, steps", "B·S·Z", 4, "Mamba's slow_forward", 8),
    ],
    "conv": [("B, C, x and their products", "B·S·H", 2, "ShortConv.slow_forward", 5)],
    "recurrent": [("gates and states", "B·S·Z", 4, "RecurrentGemmaRglru", 16)],
}
