"""`fit` says that a size is too tight to call where it leaves less free than what nobody counts may take."""

from harness.allocator.settings import parse_settings
from harness.fit import fit_confirmed, fit_lines
from harness.fit.changes import overrides
from harness.hardware.hardware import Hardware, find_hardware, with_memory
from harness.recipe import Recipe
from harness.simulate.simulated_run import simulate
from harness.units import in_gib
from tests.support.releases import keeps_workspaces
from tests.support.tiny import tiny

MiB = 2**20
A100 = find_hardware("a100-40gb")
LORA = tiny(adapter="lora", precision="bf16", micro_batch_size=1, seq_len=1024)
PLAIN, EXPANDABLE = parse_settings(""), parse_settings("expandable_segments:True")


def with_mib(mib: int) -> Hardware:
    """An A100 that has so much memory beside the CUDA context."""
    return with_memory(A100, A100.calibration.cuda_context_bytes + mib * MiB)


def left(recipe: Recipe, hardware: Hardware, settings=PLAIN) -> int:
    """The bytes that are free when all that a simulation reserves, and the CUDA context, are taken."""
    memory = simulate(recipe, hardware, settings, explain_oom=False)[0].memory
    assert memory.peak_reserved_bytes is not None
    return hardware.memory_bytes - hardware.calibration.cuda_context_bytes - memory.peak_reserved_bytes


@keeps_workspaces
def test_the_largest_size_is_too_tight_where_it_leaves_less_than_is_not_counted() -> None:
    verdicts = set[bool]()
    for mib in (100, 120, 134):
        device = with_mib(mib)
        found = fit_confirmed(LORA, device, PLAIN)
        lines = [*fit_lines("lora", "an A100", LORA, device, found)]
        for field, exact in found.largest.items():
            start = next(n for n, line in enumerate(lines) if line.startswith(f"  largest {field}"))
            free = left(LORA.model_copy(update={field: exact.value}), device)
            tight = free < device.memory_bytes // 50
            said = lines[start + 2]
            assert said.startswith("    too tight to call in the ") is tight, (mib, field)
            assert (f": {in_gib(free)} to spare, and not counted: " in said) is tight
            verdicts.add(tight)
    assert verdicts == {True, False}


@keeps_workspaces
def test_a_change_with_expandable_segments_says_how_much_it_leaves() -> None:
    """Of a recipe that fits with a change only where segments expand: the whole verdict is said."""
    verdicts = set[str]()
    heavy = LORA.model_copy(update={"micro_batch_size": 8})
    for mib in (106, 113):
        device = with_mib(mib)
        found = fit_confirmed(heavy, device, PLAIN)
        said = [line for line in fit_lines("", "", heavy, device, found) if line.startswith("With PYTORCH")]
        if not said:  # a release of PyTorch that loses less in pieces
            continue
        changes, _, verdict = found.together_expandable.partition(": ")
        assert said == [f"With PYTORCH_ALLOC_CONF=expandable_segments:True and {changes}: {verdict}"]
        changed = Recipe.model_validate(heavy.model_dump() | dict(w.split("=") for w in changes.split()))
        assert overrides(heavy, changed.model_dump()) == changes
        free = left(changed, device, EXPANDABLE)
        tight = free < device.memory_bytes // 50
        assert verdict.startswith("too tight to call in the " if tight else "fits in the ")
        assert f"{in_gib(free)} to spare" in verdict
        verdicts.add(verdict.partition(" in ")[0])
    assert verdicts
