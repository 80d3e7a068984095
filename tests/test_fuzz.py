"""Random shapes, dtypes, layouts, routings and bad numbers for every operator and body against float64, forward and gradients."""
import pytest
from hypothesis import given, settings

from strategies import BODIES, CHECKS, DEV, KERNELS, problems

SMALL = dict(tokens=10, width=24, experts=4, blocks=(16,))        # the interpreter runs a program a millisecond
RUNS = [(name, body) for body in BODIES for name in CHECKS if body == "torch" or name in KERNELS]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("examples", [50, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name, body", RUNS)
def test_operator(name, body, examples, record_property):
    done = 0

    @settings(max_examples=examples)
    @given(problems(BODIES[body], **(SMALL if body == "triton" and DEV == "cpu" else {})))
    def holds(problem):
        nonlocal done
        done += 1
        CHECKS[name](problem, body)

    holds()
    record_property("examples", dict(what=f"{name}, {body}", n=done))
