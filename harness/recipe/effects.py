"""The recipe fields that do not change a step's memory and time, and what they change instead."""

from typing import Literal, NamedTuple


class Effect(NamedTuple):
    """The effect of a field that does not change a step's memory and time."""

    changes: Literal["values", "source", "run"]
    """What it changes: values that are computed, where weights and code come from, or how a run proceeds."""
    why: str
    """Why a step's memory and time stay the same."""


EFFECTS = {
    "weights": Effect("source", "memory and time do not depend on the values"),
    "trust_remote_code": Effect("source", "decides whose Python runs, not what it computes"),
    "data": Effect("values", "every batch has the recipe's shape, whatever is in it"),
    "dpo_beta": Effect("values", "a factor in a product that is there anyway"),
    "lora_alpha": Effect("values", "a factor in a product that is there anyway"),
    "use_rslora": Effect("values", "another factor in that product"),
    "learning_rate": Effect("values", "a factor in the update"),
    "seed": Effect("values", "memory and time do not depend on the values"),
    "steps": Effect("run", "how many steps are timed; a step costs the same"),
    "warmup_steps": Effect("run", "how many steps run before the clock starts; a step costs the same"),
    "checkpoint_every": Effect(
        "run", "written between steps, from what is there anyway, into host memory and files"
    ),
    "on_nan": Effect("run", "whether the run goes on; a step costs the same whatever its values"),
}
"""The effect of each such field. Every other field changes the memory or the time of a step."""


def fields_that_change(what: Literal["values", "source", "run"]) -> tuple[str, ...]:
    """Names of the fields that change only this."""
    return tuple(field for field, effect in EFFECTS.items() if effect.changes == what)
