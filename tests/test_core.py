"""Slots and capacity against a loop that hands them out one by one."""
import pytest
import torch
from hypothesis import given, settings, strategies as st

from moe_lab.core.types import dispatch


@st.composite
def routings(draw):
    T, E = draw(st.integers(0, 12)), draw(st.integers(1, 6))
    k = draw(st.integers(1, E))
    ids = [draw(st.permutations(range(E)))[:k] for _ in range(T)]
    none = draw(st.lists(st.booleans(), min_size=T * k, max_size=T * k))
    e = torch.tensor(ids, dtype=torch.int64).reshape(T, k)
    return torch.where(torch.tensor(none, dtype=torch.bool).reshape(T, k), -1, e), E


@given(routings(), st.none() | st.integers(0, 5), st.booleans(), st.booleans())
@settings(max_examples=50, deadline=None)
def test_dispatch_equals_loop(routing, capacity, choice_major, prioritised):
    e, E = routing
    T, k = e.shape
    priority = torch.arange(T).float() if prioritised else None
    tokens = list(range(T))[::-1] if prioritised else list(range(T))
    arrivals = [(t, j) for j in range(k) for t in tokens] if choice_major else [(t, j) for t in tokens for j in range(k)]
    used, slot, queues = [0] * E, torch.full((T, k), -1), [[] for _ in range(E)]
    for t, j in arrivals:
        x = int(e[t, j])
        if x < 0 or (capacity is not None and used[x] >= capacity): continue
        slot[t, j] = used[x]; used[x] += 1; queues[x].append(t * k + j)
    d = dispatch(e, E, capacity, priority, choice_major)
    assert d.slot.tolist() == slot.tolist()
    assert d.counts.tolist() == used
    assert d.order[: sum(used)].tolist() == [i for q in queues for i in q]
    assert sorted(d.order.tolist()) == list(range(T * k))


def test_ids_beyond_the_last_expert_are_refused():                              # G15
    for ids in ([[4]], [[0, 4]], [[7, -1]]):
        with pytest.raises(ValueError, match="num_experts=4"): dispatch(torch.tensor(ids), 4)
    d = dispatch(torch.tensor([[0, -1]]), 4)
    assert d.counts.tolist() == [1, 0, 0, 0] and d.rows().tolist() == [[0, -1]]
