"""PYTORCH_CUDA_ALLOC_CONF. What an option means was read off PyTorch 2.11 to 2.15 by setting it there."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.allocator.settings import Settings, parse_settings, settings_from_environment
from harness.errors import InputError

MiB = 2**20


def test_nothing_set_gives_the_defaults() -> None:
    assert parse_settings("") == Settings()
    assert Settings().large_segment_size_bytes == 20971520  # kLargeBuffer


def test_every_option_that_matters() -> None:
    text = (
        "expandable_segments:True,max_split_size_mb:128,garbage_collection_threshold:0.8,"
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]"
    )
    assert parse_settings(text) == Settings(
        expandable_segments=True,
        max_split_size_bytes=134217728,
        garbage_collection_threshold=0.8,
        # PyTorch's own table for this text: one entry each for 1, 2, 4, ... MiB, 32 GiB and more in the last.
        roundup_power2_divisions=(1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8),
    )
    more = parse_settings(
        "max_non_split_rounding_mb:200,large_segment_size_mb:64,per_process_memory_fraction:0.25"
    )
    assert more.large_segment_size_bytes == 64 * MiB
    assert more.max_non_split_rounding_bytes == 200 * MiB
    assert more.per_process_memory_fraction == 0.25


@pytest.mark.parametrize(
    ("value", "table"),
    [
        ("4", (4,) * 16),
        ("1", (1,) * 16),
        ("[64:8,256:4,1024:4,>:1]", (8, 8, 8, 8, 8, 8, 8, 0, 4, 0, 4, 1, 1, 1, 1, 1)),
        ("[>:8]", (0, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8)),
        ("[64:8,32:2]", (8, 8, 8, 8, 8, 2, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0)),
        ("[131072:8]", (8,) * 16),
        ("[64:8,]", (8, 8, 8, 8, 8, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0)),
        ("[]", (0,) * 16),
    ],
)
def test_roundup_table_is_pytorchs(value: str, table: tuple[int, ...]) -> None:
    assert parse_settings(f"roundup_power2_divisions:{value}").roundup_power2_divisions == table


def test_white_space_and_one_comma_at_the_end_are_allowed() -> None:
    spaced = parse_settings(" expandable_segments : True , max_split_size_mb: 200 ,")
    assert spaced == Settings(expandable_segments=True, max_split_size_bytes=200 * MiB)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_split_size:128", ["max_split_size", "max_split_size_mb"]),
        ("expandable_segment:True", ["expandable_segments"]),
        ("zzz:1", ["zzz", "Known options"]),
        ("expandable_segments:true", ["expandable_segments:true", "True or False"]),
        ("max_split_size_mb:10", ["max_split_size_mb:10", "at least 20"]),
        ("large_segment_size_mb:64,max_split_size_mb:32", ["max_split_size_mb:32", "at least 64"]),
        ("max_split_size_mb:32,large_segment_size_mb:64", ["max_split_size_mb:32", "at least 64"]),
        ("max_non_split_rounding_mb:19", ["at least 20"]),
        ("large_segment_size_mb:10", ["at least 11"]),
        ("max_split_size_mb:64abc", ["whole number of MiB"]),
        ("max_split_size_mb:-1", ["whole number of MiB"]),
        ("max_split_size_mb:1e3", ["whole number of MiB"]),
        ("garbage_collection_threshold:1", ["between 0 and 1"]),
        ("garbage_collection_threshold:nan", ["between 0 and 1"]),
        ("per_process_memory_fraction:1.5", ["from 0 to 1"]),
        ("roundup_power2_divisions:3", ["power of two"]),
        ("roundup_power2_divisions:0", ["power of two"]),
        ("roundup_power2_divisions:[48:8]", ["48:8", "powers of two"]),
        ("roundup_power2_divisions:[64:8", ["bracket"]),
        ("max_split_size_mb", ["max_split_size_mb", "key:value"]),
        ("max_split_size_mb:", ["key:value"]),
        (",expandable_segments:True", ["key:value"]),
        ("expandable_segments:True,expandable_segments:False", ["twice"]),
        ("backend:cudaMallocAsync", ["cudaMallocAsync", "cannot be simulated", "backend:native"]),
        ("backend:jemalloc", ["backend:native"]),
        ("throw_on_cudamalloc_oom:True", ["cannot be simulated"]),
        ("expandable_segments_reserve:0.5", ["cannot be simulated"]),
    ],
)
def test_a_mistake_is_named_with_its_variable(text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_settings(text, origin="PYTORCH_ALLOC_CONF")
    for word in ["PYTORCH_ALLOC_CONF", *words]:
        assert word in str(caught.value)


def test_options_that_change_nothing_here_are_listed() -> None:
    settings = parse_settings("backend:native,pinned_num_register_threads:8,expandable_segments:True")
    assert settings == Settings(expandable_segments=True, ignored=("backend", "pinned_num_register_threads"))


def test_the_cuda_variable_hides_the_general_one_even_when_empty() -> None:
    # Measured with 2.11, 2.13 and 2.15, whose documentation says the opposite.
    general = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:200"}
    assert settings_from_environment({}) == Settings()
    assert settings_from_environment(general).max_split_size_bytes == 200 * MiB
    assert settings_from_environment(general | {"PYTORCH_CUDA_ALLOC_CONF": ""}) == Settings()
    both = general | {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:100"}
    assert settings_from_environment(both).max_split_size_bytes == 100 * MiB
    with pytest.raises(InputError, match="PYTORCH_CUDA_ALLOC_CONF"):
        settings_from_environment({"PYTORCH_CUDA_ALLOC_CONF": "nonsense:1"})


@pytest.mark.parametrize(
    ("version", "order"),
    [
        ("2.11.0+cu130", "address"),
        ("2.12.1", "block_counter"),
        ("2.13.0+cpu", "segment_counter"),
        ("2.15.0a0+git1234", "segment_counter"),
        ("3.0", "segment_counter"),
    ],
)
def test_free_blocks_are_ranked_as_the_version_does(version: str, order: str) -> None:
    assert parse_settings("", version).free_block_order == order


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="main"):
        parse_settings("", "main")


limits = st.sampled_from(["max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb"])
divisions = st.tuples(st.integers(1, 70), st.integers(0, 9), st.sampled_from([">", "4", "128", "x"]))
options = st.one_of(
    st.builds("{}:{}".format, limits, st.integers(0, 99)),
    st.sampled_from(["True", "False", "true", "1"]).map("expandable_segments:{}".format),
    st.sampled_from(["0.5", "0", "1", ".9", "2", "x"]).map("garbage_collection_threshold:{}".format),
    st.integers(1, 9).map("roundup_power2_divisions:{}".format),
    divisions.map(lambda given: "roundup_power2_divisions:[{}:{},{}:8]".format(*given)),
)


@given(st.lists(options, min_size=1, max_size=3, unique_by=lambda option: option.split(":")[0]))
def test_accepts_exactly_what_torch_accepts(chosen: list[str]) -> None:
    text = ",".join(chosen)
    try:
        torch._C._accelerator_setAllocatorSettings(text)
        torch_accepts = True
    except (ValueError, RuntimeError):
        torch_accepts = False
    finally:
        # What an empty text sets back, and what it does not.
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
        torch._C._accelerator_setAllocatorSettings("")
    try:
        parse_settings(text)
        accepts = True
    except InputError:
        accepts = False
    assert accepts == torch_accepts, text
