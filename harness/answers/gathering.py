"""The answers that `harness validate` compares: profiles that are given or found in profiles/, and those that
are made now.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.answers.comparison import described, different_fields
from harness.answers.one_answer import Prediction, emulated, predicted
from harness.architecture import with_attention
from harness.data import check_data
from harness.errors import InputError
from harness.hardware import DEFAULT_HARDWARE, Hardware, find_hardware, split_hardware, table_device
from harness.recipe import EFFECTS, Recipe, check_recipe, load_recipe
from harness.step_profile import StepProfile
from harness.system import profiles_folder


@dataclass
class Case:
    """One recipe on one device of the table, and the profiles of it so far."""

    name: str
    recipe: Recipe
    hardware: Hardware
    profiles: list[StepProfile] = field(default_factory=list[StepProfile])
    notes: list[str] = field(default_factory=list[str])
    """Sentences about the answers that are missing, and why."""

    def has(self, source: str) -> bool:
        """Whether there is a profile of this source."""
        return any(profile.source == source for profile in self.profiles)


def gather(
    arguments: Sequence[str],
    measure: Callable[[str, Recipe], StepProfile] | None = None,
    memory: str | None = None,
    *,
    emulate: bool = False,
) -> list[Case]:
    """The cases that the command's arguments name: recipes with overrides, or profiles; and a device.

    `measure` is called with each recipe and its name, where it is given, and returns the measured profile.
    `memory` is the size of the device that is predicted for, as in 16GiB. With `emulate` each recipe runs on
    a virtual GPU too. Raises InputError for what cannot be read, where no recipe and no profile is named, and
    for overrides of a profile's recipe.
    """
    inside = [os.path.join(text, "profile.json") for text in arguments]  # of a run folder
    arguments = [
        path if os.path.lexists(path) else text for text, path in zip(arguments, inside, strict=True)
    ]
    paths = [text for text in arguments if _is_profile(text)]
    rest = [text for text in arguments if not _is_profile(text)]
    recipes = [text for text in rest if "=" not in text]
    named = memory is not None or any(text.startswith("hardware=") for text in rest)
    hardware, overrides = split_hardware([text for text in rest if "=" in text], memory)
    if not paths and not recipes:
        raise InputError(
            "there is nothing to validate. Give a recipe's name, a profile.json or a run folder."
        )
    if paths and overrides:
        raise InputError(
            f"{overrides[0]} cannot change the recipe of a profile that is there already. "
            "Give the recipe instead of the profile, or leave the override out."
        )
    cases = _of_profiles(paths, hardware if named else None)
    for source in recipes:
        name, recipe = load_recipe(source, overrides)
        check_data(recipe)
        recipe = with_attention(recipe)
        case = Case(name, recipe, hardware)
        if measure is not None:
            case.profiles.append(measure(name, recipe))
            case.hardware = hardware if named else table_device(case.profiles[0]) or hardware
        else:
            _find_committed(case, "measured")
        if emulate:
            case.profiles.append(emulated(name, recipe, case.hardware))
        else:
            _find_committed(case, "emulated")
        cases.append(case)
    return cases


def complete(case: Case, sources: Sequence[Prediction] = ("napkin", "simulated")) -> None:
    """Add the predictions of `sources` that the case lacks, or a note on why one cannot be made."""
    ran = next((profile for profile in case.profiles if profile.source in ("measured", "emulated")), None)
    # a prediction is held against what ran, and so has the allocator settings under which that ran
    environment: Mapping[str, str] = os.environ if ran is None else ran.provenance.get("settings") or {}
    for source in sources:
        if not case.has(source):
            try:
                case.profiles.append(predicted(source, case.recipe, case.hardware, environment))
            except InputError as error:
                case.notes.append(f"there is no {source} answer: {error}")


def _is_profile(text: str) -> bool:
    return text.endswith(".json") and ("=" not in text or os.path.exists(text))


def _of_profiles(paths: Sequence[str], hardware: Hardware | None) -> list[Case]:
    """The cases of some profiles. Profiles of one recipe on one device are one case, named after the first
    one's file. `hardware` replaces the device that a profile names."""
    cases: dict[Any, Case] = {}
    for text in paths:
        path = Path(text)
        profile = StepProfile.read(path)
        if profile.recipe is None:
            raise InputError(
                f"{path} is about a command ({profile.subject}), and only a recipe has other answers to "
                "compare with. Show it by `harness report`."
            )
        device = hardware or table_device(profile) or find_hardware(DEFAULT_HARDWARE)
        recipe = check_recipe(profile.recipe, f"{path}: recipe")  # an older profile lacks newer fields
        key = device.name, repr(recipe.model_dump(exclude=set(EFFECTS)))
        if key not in cases:
            cases[key] = Case(_name(path), recipe, device)
        cases[key].profiles.append(profile)
    return list(cases.values())


def _name(path: Path) -> str:
    """The name of a profile: smoke for profiles/h200/smoke.measured.json, the folder's for a run folder."""
    return path.absolute().parent.name if path.name == "profile.json" else path.name.split(".json")[0]


def _find_committed(case: Case, source: str) -> None:
    """Add profiles/<gpu>/<recipe>.<source>.json to the case, or a note if it is of another recipe."""
    path = profiles_folder() / case.hardware.name / f"{case.name}.{source}.json"
    if not path.exists():
        return
    profile = StepProfile.read(path)
    differing = different_fields(profile.recipe or {}, case.recipe.model_dump(mode="json"))
    if differing:
        case.notes.append(f"not compared with {path}, which is of another recipe: {described(differing)}")
    else:
        case.profiles.append(profile)
