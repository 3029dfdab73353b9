"""Learning-rate schedules, value by value, from the formulas that the settings promise."""

import math

import pytest

from jaxseek.optim.schedule import learning_rate_schedule
from jaxseek.run_config import OptimConfig

PEAK = 0.5


def rates(steps: int, **settings) -> list[float]:
    schedule = learning_rate_schedule(OptimConfig(learning_rate=PEAK, **settings), steps=steps)
    return [float(schedule(n)) for n in range(steps)]


def warm(n: int, warmup: int) -> float | None:
    """Rate of update n inside the warm-up: the first update moves, the last has the peak."""
    return PEAK * (n + 1) / warmup if n < warmup else None


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("steps", [5, 12])
def test_constant_stays_at_the_peak(steps, warmup):
    expected = [warm(n, warmup) or PEAK for n in range(steps)]
    assert rates(steps, schedule="constant", warmup_steps=warmup) == pytest.approx(expected)


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("steps", [5, 12])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_cosine_falls_from_the_peak_to_its_final_fraction_at_the_last_step(steps, warmup, final):
    peak_at = max(warmup - 1, 0)
    expected = []
    for n in range(steps):
        share = (n - peak_at) / (steps - 1 - peak_at)
        cosine = PEAK * (final + (1 - final) * (1 + math.cos(math.pi * share)) / 2)
        expected.append(warm(n, warmup) or cosine)
    actual = rates(steps, schedule="cosine", warmup_steps=warmup, final_fraction=final)
    assert actual == pytest.approx(expected, abs=1e-7)
    assert actual[-1] == pytest.approx(PEAK * final, abs=1e-7)


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_multi_step_drops_twice_at_its_shares_of_the_run(warmup):
    actual = rates(20, schedule="multi_step", warmup_steps=warmup, multi_step_at=(0.6, 0.9))
    expected = [
        warm(n, warmup) or PEAK * (1 if n < 12 else 0.316 if n < 18 else 0.316**2)
        for n in range(20)
    ]
    assert actual == pytest.approx(expected, rel=1e-6)
    assert actual[-1] == pytest.approx(0.1 * PEAK, rel=2e-3)  # DeepSeek's x 0.1


def test_multi_step_drops_twice_in_a_run_too_short_to_tell_the_two_apart():
    actual = rates(5, schedule="multi_step", warmup_steps=0)
    assert actual == pytest.approx([PEAK] * 4 + [0.316**2 * PEAK], rel=1e-6)


def test_left_out_warm_up_is_a_fifth_of_the_run():
    assert rates(10) == rates(10, warmup_steps=2)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_run_that_is_all_warm_up_ends_at_the_peak(schedule):
    actual = rates(3, schedule=schedule, warmup_steps=3)
    assert actual == pytest.approx([PEAK / 3, PEAK * 2 / 3, PEAK])


@pytest.mark.parametrize("schedule", ["constant", "cosine", "multi_step"])
def test_one_step_has_the_peak(schedule):
    assert rates(1, schedule=schedule, warmup_steps=0) == pytest.approx([PEAK])
