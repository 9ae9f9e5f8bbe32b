"""JSON from anyone: counted before it is made, and read only as it was meant."""

import json
import tracemalloc

import pytest

from harness.system.strict_json import LARGEST_INTEGER, MAX_VALUES, TooManyValues, parse_json


def test_what_json_says_is_read() -> None:
    document = {"a": [1, -2.5, 1e300, LARGEST_INTEGER, -LARGEST_INTEGER, True, None, "ä\n"], "": {}}
    assert parse_json(json.dumps(document)) == document
    assert parse_json("\ufeff[1]".encode()) == [1]
    assert parse_json("0.0000000000000000000000000001") == 1e-28


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": 1, "b": 2, "a": 1}', "'a' is given twice"),
        ('[{"x": {"": 1, "": 2}}]', "'' is given twice"),
        ("[NaN]", "NaN is no number"),
        ("-Infinity", "-Infinity is no number"),
        ("1e999", "1e999 is a number too large"),
        ("1" + "0" * 39, "more than 128 bits"),
        (str(LARGEST_INTEGER + 1), "more than 128 bits"),
        ("-" + "9" * 4000, "more than 128 bits"),
        ("9" * 5000, "more than 128 bits"),
        ('"\\ud800"', "surrogates"),
        ("[1,", "Expecting value"),
        (b"\xff", "utf-8"),
    ],
)
def test_what_is_no_json_is_refused(text: str | bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_json(text)


@pytest.mark.parametrize("piece", ["[],", "0,", '"a",', "{},", '{"a":0},', "[[]],"])
def test_values_are_counted_before_any_is_made(piece: str) -> None:
    text = "[" + piece * MAX_VALUES + "0]"
    tracemalloc.start()
    try:
        with pytest.raises(TooManyValues, match="more than 262,144 values"):
            parse_json(text)
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()
    assert len(parse_json("[" + piece * 100 + "0]", 10_000)) == 101


def test_what_nests_too_deep_is_said_to() -> None:
    with pytest.raises(RecursionError):
        parse_json("[" * 100_000 + "]" * 100_000)


def test_a_key_repeated_among_many_is_found_in_one_pass() -> None:
    text = "{" + "".join(f'"k{number}": 0,' for number in range(100_000)) + '"k99999": 0}'
    with pytest.raises(ValueError, match="'k99999' is given twice"):
        parse_json(text)


def test_the_bounds_are_what_they_say() -> None:
    assert parse_json(str(2**128 - 1)) == 2**128 - 1
    assert parse_json(str(1 - 2**128)) == 1 - 2**128
    for beyond in (2**128, -(2**128)):
        with pytest.raises(ValueError, match="128 bits"):
            parse_json(str(beyond))
    assert parse_json("[0,0]", 3) == [0, 0]  # a list and two numbers
    with pytest.raises(TooManyValues):
        parse_json("[0,0]", 2)
    assert parse_json('{"a": {}}', 3) == {"a": {}}
