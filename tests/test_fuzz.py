"""Random shapes, dtypes, layouts, routings and bad numbers for every operator and body against float64, forward and gradients."""
import os
import time

import pytest
from hypothesis import assume, given, settings

from strategies import BODIES, CHECKS, DEV, KERNELS, Problem, problems

INTERPRETED = DEV == "cpu"
if INTERPRETED: import interpreter
SMALL = dict(tokens=10, width=24, experts=4, blocks=(16,))        # the interpreter runs a program a millisecond
SECONDS = float(os.environ.get("FUZZ_SECONDS", 3000))             # an operator's share of a run; examples that it leaves no time for are drawn, not tried, not counted
RUNS = [pytest.param(name, body, n, marks=[pytest.mark.slow] * (n > 50)) for body in BODIES for name in CHECKS if body == "torch" or name in KERNELS for n in (50, 2000)]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name, body, examples", RUNS)
def test_operator(name, body, examples, record_property):
    "An example counts when it compared numbers and, in Triton's interpreter, a kernel ran for it."
    done, interpreted, end = 0, body == "triton" and INTERPRETED, time.monotonic() + SECONDS

    @settings(max_examples=examples)
    @given(problems(BODIES[body], **(SMALL if interpreted else {})))
    def holds(problem):
        nonlocal done
        if time.monotonic() > end: return
        before = interpreted and interpreter.count["launches"]
        assume(CHECKS[name](problem, body) and (not interpreted or interpreter.count["launches"] > before))
        done += 1

    holds()
    record_property("examples", dict(what=f"{name}, {body}", n=done))


# What the fuzzers found, shrunk and mended: tried on every run, at every size of the budget.
FOUND = [("compress", "torch", Problem(0, 2, 2, 1, 1, layout="strided", dtype="float64")),                              # a shared expert that is a view
         ("compress", "torch", Problem(0, 1, 1, 1, 1, values="zero", dtype="float16")),                                 # eps is 0 in float16
         ("generate", "triton", Problem(1, 1, 1, 1, 1, activation="geglu", weighted=False)),                            # token ids that are a view
         ("generate", "triton", Problem(0, 1, 1, 1, 1, activation="geglu", weighted=False, dtype="float16")),           # a dense gated MLP in half precision
         ("rows", "triton", Problem(1, 8, 1, 1, 1, activation="gelu", weighted=False, layout="offset")),                # one row of a wider matrix
         ("layer", "triton", Problem(1, 1, 1, 1, 1, activation="relu", weighted=False, values="nan")),                  # NaN from above, and a probability of 0
         ("blocksparse", "triton", Problem(0, 1, 1, 1, 1, activation="gelu", weighted=False)),                          # no block is stored
         ("blocksparse", "triton", Problem(3, 1, 1, 1, 1, "none", activation="gelu", weighted=False))]


@pytest.mark.parametrize("name, body, problem", FOUND)
def test_what_was_found_stays_mended(name, body, problem): CHECKS[name](problem, body)
