"""Hostile and broken input, made by hypothesis: values, changed JSON, changed bytes, recipes."""

import copy
import json
import pickle
from functools import cache
from typing import Any, get_args

from hypothesis import strategies as st

from harness.hardware.hardware import find_hardware
from harness.napkin.prediction import predict
from harness.recipe import Recipe, check_recipe
from tests.support.places import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
MODELS = sorted((ROOT / "tests" / "models").glob("*.json"))

NASTY = [
    "",
    " ",
    "\0",
    "\ud800",
    "../../etc/passwd",
    "/dev/zero",
    "~root",
    "a" * 5000,
    "-1",
    "1e999",
    "\u202e",
]
integers = st.one_of(
    st.integers(-3, 3),
    st.integers(),
    st.sampled_from([2**31, 2**53, 2**63, 2**64, 10**30, -(2**63), 10**4000]),
)
texts = st.text(max_size=30) | st.sampled_from(NASTY)
scalars = st.one_of(st.none(), st.booleans(), integers, st.floats(), texts)
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
"""Any value that JSON, YAML or a pickle can hold."""


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """A JSON-like document with one to four of its values replaced, removed or repeated."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 4))):
        holder, key = document, None
        while isinstance(holder, dict | list) and holder:
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            key = draw(st.sampled_from(keys))
            inner = holder[key]
            if not (isinstance(inner, dict | list) and inner) or draw(st.integers(0, 3)) == 0:
                break
            holder = inner
        if key is None:
            return draw(junk)
        match draw(st.sampled_from(("replace", "remove", "number", "repeat"))):
            case "remove":
                del holder[key]
            case "repeat" if isinstance(holder, list):
                holder.append(holder[key])
            case "number":
                holder[key] = draw(integers)
            case _:
                holder[key] = draw(junk)
    return document


@st.composite
def spliced(draw: st.DrawFn, contents: list[bytes], alphabet: bytes = b"") -> bytes:
    """One of the contents with bytes changed, cut out, repeated or put in; or bytes of no kind."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300))
    data = bytearray(draw(st.sampled_from(contents)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([0, 1, 1, 2, 4, 8, 64]))
        put = draw(st.binary(max_size=9))
        if alphabet and draw(st.booleans()):
            put = bytes(draw(st.lists(st.sampled_from(alphabet), min_size=1, max_size=4)))
        if draw(st.integers(0, 5)) == 0:
            put = bytes(data[place : place + 64]) * 2
        data[place : place + length] = put
    return bytes(data)


def _values(name: str) -> st.SearchStrategy[Any]:
    """Values that the field could have, and now and then some it cannot."""
    schema = Recipe.model_json_schema()["properties"][name]
    options = [option for part in (schema, *schema.get("anyOf", [])) for option in part.get("enum", [])]
    options += get_args(Recipe.model_fields[name].annotation) if not options else []
    plausible: list[Any] = [option for option in options if isinstance(option, str)]
    plausible += {"boolean": [True, False], "integer": [1, 2, 3, 8, 64], "number": [0.1, 1.0, 32]}.get(
        schema.get("type", ""), []
    )
    return st.one_of(st.sampled_from(plausible), st.sampled_from(plausible), junk) if plausible else junk


recipe_fields = st.dictionaries(st.sampled_from(sorted(Recipe.model_fields)), st.none(), max_size=8).flatmap(
    lambda chosen: st.fixed_dictionaries({name: _values(name) for name in chosen})
)
"""Fields of a recipe, their values mostly from the schema."""


def as_json(value: Any) -> bytes:
    """A document as bytes, with NaN, lone surrogates and all."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


@cache
def profile_document() -> dict[str, Any]:
    recipe = check_recipe({"model": "tiny-llama-bytes", "seq_len": 16}, "here")
    return predict(recipe, find_hardware("l4")).model_dump(mode="json")


@cache
def snapshot_document() -> dict[str, Any]:
    """A snapshot with every kind of entry, as small as can be."""
    frames = [{"filename": "a.py", "line": 1, "name": "f"}]
    trace = []
    for step in range(3):
        for phase in ("forward", "backward"):
            metadata = f"phase={phase} step={step}"
            shared = {"user_metadata": metadata, "stream": 0, "pool_id": (0, 0), "frames": frames}
            address = 2**40 + 2**21 * step
            trace += [
                {"action": "segment_alloc", "addr": address, "size": 2**21, "time_us": len(trace), **shared},
                {"action": "alloc", "addr": address, "size": 700, "time_us": len(trace), **shared},
                {"action": "free_requested", "addr": address, "size": 700, "time_us": len(trace), **shared},
                {"action": "free_completed", "addr": address, "size": 700, "time_us": len(trace), **shared},
            ]
    trace.append({"action": "oom", "device_free": 5, "size": 2**40, "time_us": 99, "frames": frames})
    block = {"address": 2**40, "size": 2**21, "requested_size": 700, "state": "inactive", "frames": []}
    segment = {"device": 0, "address": 2**40, "total_size": 2**21, "stream": 0, "segment_type": "small"}
    return {
        "segments": [{**segment, "segment_pool_id": (0, 0), "is_expandable": False, "blocks": [block]}],
        "device_traces": [trace, []],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
    }


PICKLES = [pickle.dumps(snapshot_document(), protocol) for protocol in range(6)]
