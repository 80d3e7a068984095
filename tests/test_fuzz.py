"""Random shapes, dtypes, layouts, routings and bad numbers for every operator and body against float64, forward and gradients."""
import pytest
from hypothesis import given, settings

from strategies import BODIES, CHECKS, KERNELS, problems

RUNS = [(name, body) for body in BODIES for name in CHECKS if body == "torch" or name in KERNELS]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("examples", [50, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name, body", RUNS)
def test_operator(name, body, examples, record_property):
    done = 0

    @settings(max_examples=examples)
    @given(problems(BODIES[body]))
    def holds(problem):
        nonlocal done
        done += 1
        CHECKS[name](problem, body)

    holds()
    record_property("examples", done)
