"""Ablations: what is stored answers every claim, a second call trains nothing, an arm decides its own folder."""
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_lab.models import ablations as a
from moe_lab.models.gpt import GPTConfig
from moe_lab.models.train import TrainConfig

TINY = a.Scale(GPTConfig(300, 16, 4, 2, 16, activation="gelu"), TrainConfig(steps=4, batch_size=2, context=16, eval_windows=2, warmup=1), experts=2)


def test_every_claim_has_three_stored_seeds():
    runs = a.stored()["runs"]
    for c in a.claims(a.SCALES["gpu"]):
        seeds = [{r["seed"] for r in runs if (r["experiment"], r["arm"]) == (c.experiment, arm)} for arm in (c.better, c.worse)]
        assert min(map(len, seeds)) >= 3 and seeds[0] == seeds[1], c
        mean, half, words = a.verdict(runs, c)
        assert half > 0 and words


def test_stored_runs_are_what_the_arms_say():
    "Parameters and bytes of the stored runs follow from today's configs."
    arms, counted = a.experiments(a.SCALES["gpu"]), {}
    for r in a.stored()["runs"] + a.earlier()["runs"]:
        model = arms[r["experiment"]][r["arm"]].model
        if model not in counted: n = a.num_params(model); counted[model] = n.total, n.active, a.exchange_bytes(model, 1)
        assert (r["total"], r["active"], r["sent"]) == counted[model], (r["experiment"], r["arm"])


@pytest.fixture
def small(monkeypatch, tmp_path):
    import asyncio
    text = a.load_corpus(Path(asyncio.__file__).parent, 300)
    monkeypatch.setitem(a.SCALES, "cpu", TINY)
    monkeypatch.setattr(a, "texts", lambda scale: (text, text))
    return tmp_path


def test_a_second_call_trains_nothing(small, capsys, monkeypatch):
    a.ablate("halves", seeds=2, out=str(small), device="cpu")
    first, rows = capsys.readouterr().out, json.loads((small / "halves-cpu.json").read_text())
    assert len(rows) == 4 and {r["seed"] for r in rows} == {0, 1}
    from moe_lab.models import train
    def stepped(*_): raise AssertionError("trained again")
    monkeypatch.setattr(torch.optim.AdamW, "step", stepped)
    a.ablate("halves", seeds=2, out=str(small), device="cpu")
    assert capsys.readouterr().out.splitlines()[-2:] == first.splitlines()[-2:]


def test_whatever_differs_has_a_folder_of_its_own(tmp_path):
    arms = a.experiments(TINY)
    base = arms["residual"]["top-1"]
    others = [a.seeded(base, 1), replace(base, train=replace(base.train, lr=1e-4)), replace(base, model=replace(base.model, top_k=2)), arms["students"]["full KD"], arms["students"]["staged KD"]]
    assert len({a.folder(o, tmp_path) for o in (base, *others)}) == 6
    assert a.folder(base, tmp_path) == a.folder(replace(base), tmp_path)
