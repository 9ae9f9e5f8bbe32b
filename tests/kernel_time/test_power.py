"""When the power limit slows products down: worked by hand."""

from dataclasses import replace

import pytest

from harness.hardware import find_hardware
from harness.kernel_time import PowerLimit
from harness.kernel_time.parameters import document, limit_reached, power_slowdown

H100 = find_hardware("h100")
AT_BOOST = document()["sustained_clock"]["9.0"]["fraction"]


def test_the_clock_stays_up_while_a_step_computes_half_of_its_time() -> None:
    power = PowerLimit(H100)
    assert power.factor == pytest.approx(AT_BOOST, rel=1e-3)
    power.after_step(0.5, 1.0)
    assert power.factor == pytest.approx(AT_BOOST, rel=1e-3)
    power.after_step(0.0, 0.0)  # nothing ran
    assert power.factor == pytest.approx(AT_BOOST, rel=1e-3)


def test_a_step_that_computes_all_the_time_is_at_the_limit() -> None:
    power = PowerLimit(H100)
    power.after_step(0.9, 1.0)
    assert power.factor == 1.0
    # the same step, whose products take longer now: the share counts as it is at the boost clock
    power.after_step(0.9 / AT_BOOST, 0.1 + 0.9 / AT_BOOST)
    assert power.factor == 1.0


def test_between_them_it_grows_evenly() -> None:
    reached = limit_reached(H100)
    assert reached is not None
    power = PowerLimit(H100)
    power.after_step(sum(reached) / 2, 1.0)
    slowdown = power_slowdown(H100)
    assert power.factor == pytest.approx((1 + slowdown / 2) / (1 + slowdown))


def test_elsewhere_products_are_always_at_the_limit() -> None:
    told = H100.calibration.model_copy(update={"sustained_clock": 0.9})
    for hardware in (find_hardware("a100-80gb"), replace(H100, calibration=told)):
        power = PowerLimit(hardware)
        power.after_step(0.1, 1.0)
        assert power.factor == 1.0
