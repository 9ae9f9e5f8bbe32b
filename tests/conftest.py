"""The surroundings of every test, set before torch is imported."""

import gc
import os
import signal
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.commands import Call, exit_status

os.environ["HF_HUB_OFFLINE"] = "1"  # what is not on this machine fails at once
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: a second thread costs more than it brings

pytest_plugins = ["tests.support.trust_report", "tests.support.attempts"]

if settings.default.deadline is not None:  # tests/mutation has a profile of its own
    # an example that waits for a processor is not wrong
    settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("unhurried")

# A shell starts its background jobs deaf to Ctrl-C; the tests of interrupts need it heard.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _as_wide_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed is not broken into lines: a process of pytest-xdist says how wide its terminal is."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True, scope="session")
def _a_cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Formulas of this run alone: nothing is found that an earlier one has kept, nor left in the user's."""
    os.environ["HARNESS_CACHE"] = str(tmp_path_factory.mktemp("cache"))


LONG = (
    "tests/answers/test_two_profiles.py::test_two_environments",  # versions
    "tests/api/test_names.py::test_a_question_is_the_same_object",  # orders of imports, each in a fork
    "tests/benchmarks/test_gpu_programme.py",  # a rehearsal of all of it
    "tests/benchmarks/test_gpu_tasks.py::test_one_broken_part",  # processes that import torch
    "tests/benchmarks/test_gpu_tasks.py::test_without_a_gpu",
    "tests/benchmarks/test_questions.py",  # what the guide's commands print, each command again
    "tests/benchmarks/test_window.py::test_what_pytest_said",  # a suite of its own
    "tests/browser",  # a browser
    "tests/formula/test_shipped.py::test_it_says_what_a_simulation_says",  # a simulation of each recipe
    "tests/parallel/test_equality.py",  # trains on ranks
    "tests/launch",  # ranks, processes of their own, and what becomes of them when one is killed
    "tests/track",  # trackers in processes
    "tests/mcp/test_mcp.py",  # servers
    "tests/mcp/test_same_answers.py",  # simulations, asked for by everybody
    "tests/trust/test_fuzz",  # hostile files
    "tests/trust",  # killing, filling the disk
    "tests/sweep/test_launchers.py",  # clusters
    "tests/watching/test_watch.py",  # programs
    "tests/watching/test_largest.py::test_a_program",  # programs, again and again
    "tests/watching/test_largest.py::test_none_fits",
    "tests/watching/test_largest.py::test_the_peak_of",
    "tests/training/toggles/test_loss.py",  # Triton's interpreter
    "tests/training/toggles/test_pairs.py::test_every_pair_trains",  # every two values of any two toggles
    "tests/measure/test_measured_run.py::test_the_command_in_trouble",  # processes
    "tests/benchmarks/test_cards.py::test_a_simulation_says_so_today",  # a simulation of each
    "tests/fit/test_advice.py::test_a_saving_is",  # full size
    "tests/fit/test_confirmed.py::test_a_full_size_recipe",
    "tests/fit/test_confirmed.py::test_any_family",  # a whole search each, of what others hold in part
    "tests/fit/test_confirmed.py::test_it_says_what_holds_it_back",
    "tests/fit/test_device_choice.py::test_a_device_far_too_small",
    "tests/fit/test_device_choice.py::test_a_recipe_is_not_changed",
    "tests/fit/test_lengths.py::test_pairs_are_padded",
    "tests/fit/test_lengths.py::test_what_bitsandbytes_leaves",
    "tests/fit/test_few_layers.py::test_a_search_finds_the_same",  # of few layers and of all
    "tests/fit/test_too_tight.py::test_a_change_with_expandable",
    "tests/fit/test_too_tight.py::test_the_largest_size",
    "tests/formula/test_repeated_layers.py::test_requests_of_a_deep_model",
    "tests/project/test_readme.py::test_the_cover",  # full size
    "tests/serve/test_asking.py::test_a_simulation",  # a server's worker
    "tests/serve/test_asking.py::test_a_w",
    "tests/serve/test_asking.py::test_an_ended_server",
    "tests/serve/test_asking.py::test_who_stops",
    "tests/serve/test_asking.py::test_one_at_a_time",
    "tests/serve/test_asking.py::test_fifty",
    "tests/serve/test_serve_many.py",  # thousands of runs and requests
    "tests/simulate/test_causal_models.py::test_the_peaks",  # a simulation of each
    "tests/simulate/test_simulated_run.py::test_every_",
)
"""What `make test` leaves to `make test-long`: beginnings of names. PART=1/4 takes every fourth."""
MANY = (
    "tests/benchmarks/test_cards.py::test_a_simulation_says_so_today",
    "tests/benchmarks/test_questions.py",
    "tests/browser",
    "tests/simulate/test_causal_models.py::test_the_peaks",
    "tests/simulate/test_simulated_run.py::test_every_",
)
"""Those that take as long as several others: PART takes every fourth of their tests, as of those that files
mark themselves (tests/support/long.py), and of all of the virtual GPU's."""
MARKS_LONG = "tests.support.long"
"""What a file with such tests imports."""


SLOW = (
    *LONG,
    "tests/api/test_api.py",  # simulations
    "tests/api/test_names.py",  # orders of imports, each in a fork
    "tests/architecture/test_model_id.py",  # a hub
    "tests/ask/test_ask.py::test_a_formula",  # simulations
    "tests/architecture/test_architecture.py::test_parameters_of_any_family",  # builds each
    "tests/architecture/test_models.py::test_parameter_count_is_the_published_one",
    "tests/architecture/test_saved_weights.py::test_weights_that_are_saved_quantized",
    "tests/benchmarks",
    "tests/checkpoint",
    "tests/cli/test_cli.py::test_a_",  # processes of their own
    "tests/cli/test_cli.py::test_light_commands",
    "tests/cli/test_cli.py::test_what_stays_in_16_bit",
    "tests/cli/test_columns.py",  # every command, twice
    "tests/cli/test_simulate.py",
    "tests/data/test_examples.py::test_the_commands_refuse_it",
    "tests/fit/test_advice.py",
    "tests/fit/test_card_count.py",
    "tests/fit/test_confirmed.py",  # simulations, many a test
    "tests/fit/test_device_choice.py",
    "tests/fit/test_few_layers.py",
    "tests/fit/test_lengths.py",
    "tests/fit/test_search.py",
    "tests/fit/test_sharding.py",
    "tests/fit/test_too_tight.py",
    "tests/formula/test_formula.py",  # simulations to compare with
    "tests/formula/test_repeated_layers.py",
    "tests/gpu",
    "tests/loops/test_adapters.py",  # whole trainers
    "tests/loops/test_finder.py",  # trains, watched
    "tests/mcp",  # a server
    "tests/measure",  # whole runs
    "tests/models",
    "tests/napkin/test_prediction.py",  # every recipe, many times
    "tests/napkin/test_terms.py",  # compiles
    "tests/napkin/test_timing.py",
    "tests/napkin/test_weights.py",
    "tests/parallel",
    "tests/project/test_contributing.py::test_the_walk",  # a command, traced
    "tests/project/test_packaging.py",  # builds a wheel
    "tests/project/test_pages.py",  # every page made again
    "tests/recipe/test_file.py",
    "tests/report/test_first_words.py::test_the_report_of_a_simulation",
    "tests/report/test_report.py",
    "tests/run_folder",
    "tests/serve",  # a server
    "tests/simulate/cuda",
    "tests/simulate/test_after_step.py",
    "tests/simulate/test_causal_models.py",
    "tests/simulate/test_clock.py",
    "tests/simulate/test_hardware_traces.py",
    "tests/simulate/test_memory.py",
    "tests/simulate/test_micro_batches.py",
    "tests/simulate/test_ranks.py",
    "tests/simulate/test_simulate_equals_cpu.py",  # trains, and simulates the same
    "tests/simulate/test_simulated_run.py",
    "tests/snapshot/test_attribution.py",  # runs, moment by moment
    "tests/snapshot/test_safe_read.py::test_a_million_events",
    "tests/snapshot/test_trace.py::test_live_bytes",
    "tests/sweep",  # cells in processes
    "tests/system/test_folder_lock.py",  # processes that hold a folder
    "tests/system/test_garbage.py",
    "tests/training/test_evaluation.py::test_logits_and_losses_are_trainers",
    "tests/training/test_trainer_parity.py",
    "tests/training/toggles",  # trains with and without each
    "tests/watching",  # programs
)
"""What `make test-fast` leaves out: beginnings of test names."""
RECORDED = "tests/simulate/test_recorded_traces.py"
"""Of these, it takes one recording a device."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether to pass over a whole file without importing it, which costs as much as the quick tests."""
    name = collection_path.relative_to(config.rootpath).as_posix()
    chosen = config.option.markexpr
    left_out = SLOW if "not slow" in chosen else LONG if "not long" in chosen else ()
    if name in left_out:
        return True
    if collection_path.is_file() and "and long" in chosen:
        listed = any(long.startswith(name) for long in LONG) or name.startswith(LONG)
        python = collection_path.suffix == ".py"
        return None if listed or (python and MARKS_LONG in collection_path.read_text("utf-8")) else True
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--part 1/4` of `make test-long PART=1/4`: of the entries of LONG, every fourth one, from the first."""
    parser.addoption("--part", default="1/1", help="of the long tests: 1/4 to 4/4")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is slow and what is long; leave out what is long and of another part."""
    part, parts = map(int, config.option.part.split("/"))
    seen, many = set(), count()
    for item in items[:]:
        virtual = item.get_closest_marker("virtual_gpu") is not None
        entry = next((n for n, long in enumerate(LONG) if item.nodeid.startswith(long)), None)
        if virtual or item.get_closest_marker("long") or item.nodeid.startswith(MANY):
            entry = next(many)
        if entry is not None and entry % parts != part - 1:
            items.remove(item)
        if entry is not None and not virtual:
            item.add_marker(pytest.mark.long)
        slow = item.nodeid.startswith(SLOW) or item.get_closest_marker("long") is not None
        if item.nodeid.startswith(RECORDED) and (called := getattr(item, "callspec", None)):
            kind = item.nodeid.partition("[")[0], str(getattr(called.params.get("trace"), "parent", ""))
            slow = slow or kind in seen
            seen.add(kind)
        if slow:
            item.add_marker(pytest.mark.slow)
    # files with slow tests first: at the end no process waits long for what the other one still has to do
    with_slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in with_slow)


def pytest_collection_finish() -> None:
    """What was imported to find the tests stays: the collector need not walk through it again and again."""
    gc.freeze()


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Run `harness *words` in this process, in the test's own folder."""
    monkeypatch.chdir(tmp_path)

    def command(*words: object) -> tuple[int, str, str]:
        return exit_status(*words), *capfd.readouterr()

    return command
