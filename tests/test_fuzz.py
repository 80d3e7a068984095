"""Random shapes, dtypes, layouts, routings and bad numbers for every operator and body against float64, forward and gradients."""
import pytest
from hypothesis import given, settings

from strategies import BODIES, CHECKS, DEV, KERNELS, Problem, problems

SMALL = dict(tokens=10, width=24, experts=4, blocks=(16,))        # the interpreter runs a program a millisecond
LONG = {"grouped", "blocksparse", "generate"}     # a second an example and more: in the normal run 10 under the interpreter
slow = pytest.mark.slow
RUNS = [pytest.param(name, body, n, marks=[slow] * (n > (10 if body == "triton" and name in LONG else 50))) for body in BODIES for name in CHECKS
        if body == "torch" or name in KERNELS for n in ((10, 50, 2000) if body == "triton" and name in LONG else (50, 2000))]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name, body, examples", RUNS)
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


# What the fuzzers found, shrunk and mended: tried on every run, at every size of the budget.
FOUND = [("compress", "torch", Problem(0, 2, 2, 1, 1, layout="strided", dtype="float64")),                              # a shared expert that is a view
         ("compress", "torch", Problem(0, 1, 1, 1, 1, values="zero", dtype="float16")),                                 # eps is 0 in float16
         ("generate", "triton", Problem(1, 1, 1, 1, 1, activation="geglu", weighted=False)),                            # token ids that are a view
         ("generate", "triton", Problem(0, 1, 1, 1, 1, activation="geglu", weighted=False, dtype="float16")),           # a dense gated MLP in half precision
         ("rows", "triton", Problem(1, 8, 1, 1, 1, activation="gelu", weighted=False, layout="offset")),                # one row of a wider matrix
         ("blocksparse", "triton", Problem(0, 1, 1, 1, 1, activation="gelu", weighted=False)),                          # no block is stored
         ("blocksparse", "triton", Problem(3, 1, 1, 1, 1, "none", activation="gelu", weighted=False))]


@pytest.mark.parametrize("name, body, problem", FOUND)
def test_what_was_found_stays_mended(name, body, problem): CHECKS[name](problem, body)
