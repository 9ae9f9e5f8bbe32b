"""The findings of `harness doctor`, in the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.cli.terminal.terminal import say
from harness.units import in_gib


def print_findings(console: Console, findings: dict[str, Any]) -> None:
    """Print the findings: facts about the machine, then what works, then what does not work and why."""
    machine = findings["machine"]
    say(console, f"Python {machine['python']} on {machine['platform']}")
    say(console, f"{machine['cpus']} CPUs, {in_gib(machine['memory_bytes'])} of memory")
    for gpu in findings["gpus"]:
        say(
            console,
            f"{gpu['name']}: {in_gib(gpu['free_bytes'])} free of {in_gib(gpu['memory_bytes'])}, "
            f"compute capability {gpu['compute_capability']}, driver {gpu['driver']}, "
            f"CUDA {machine['cuda_build']}",
        )
    if machine["no_gpu_because"]:
        say(console, f"no GPU: {machine['no_gpu_because']}")
    say(
        console,
        "virtual GPU: "
        f"{machine['no_virtual_gpu_because'] or 'harness emulate and harness run --gpu work here'}",
    )
    packages = findings["packages"].items()
    say(console, ", ".join(f"{name} {version}" for name, version in packages if version))
    missing = [f"{name}{_how_to_install(name)}" for name, version in packages if not version]
    if missing:
        say(console, f"not installed: {', '.join(missing)}")
    tried = findings["toggles"] + findings["checks"]
    working: dict[str, list[str]] = {}
    for finding in tried:
        field, _, value = finding["name"].partition(": ")
        if finding["works"]:
            working.setdefault(field, []).append(value)
    _print_pairs(console, "works here", [(field, ", ".join(found)) for field, found in working.items()])
    failing = [(finding["name"], finding["reason"]) for finding in tried if not finding["works"]]
    _print_pairs(console, "does not work here, and why", failing)


def _how_to_install(package: str) -> str:
    extra = {"flash-attn": "flash-attn", "liger-kernel": "liger", "datasets": "data"}.get(package)
    return f" (pip install 'finetune-harness[{extra}]')" if extra else ""


def _print_pairs(console: Console, title: str, pairs: list[tuple[str, str]]) -> None:
    if not pairs:
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for pair in pairs:
        table.add_row(*map(Text, pair))
    console.print()
    console.print(table)
