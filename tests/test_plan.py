"moe-lab plan as an engineer calls it."
import json, time
from dataclasses import replace

import pytest

from moe_lab.cli import main
from moe_lab.cluster.topology import hgx_h100, hgx_h800, nd_a100_v4, to_yaml
from moe_lab.plan import fit, plans, sizes
from moe_lab.models.zoo import Attention, Layer, Model, zoo
from moe_lab.sim.step import Strategy, step

LAYER = Layer(512, Attention(8, 64), experts=16, d_expert=1024, top_k=2, glu=True)
SMALL = Model("small", (LAYER,) * 4, 1000)


def test_best_is_the_best_of_all_that_were_allowed():
    c = nd_a100_v4(2)
    best = plans(SMALL, c, 2**16, top=3)
    every = [step(SMALL, c, replace(s, degree=d, micro=fit(SMALL, c, s, 4096)[0].micro), 4096).seconds for s in sizes(SMALL, c) for d in (1, 2)]
    assert best[0].time.seconds <= min(every) * (1 + 1e-12)
    assert plans(SMALL, c, 2**16, top=3) == best


def test_the_first_plan_does_not_hang_on_how_many_are_asked_for():
    model, c = zoo["Mixtral-8x7B"], hgx_h800(64)
    best = plans(model, c, top=10)
    for top in (1, 3): assert plans(model, c, top=top) == best[:top]


def test_dropped_rows_are_no_flops():
    by = {f: plans(SMALL, nd_a100_v4(1), 2**15, 1024, f, top=1)[0].flops for f in (None, 1., .5, 1e-4)}
    assert 0 < by[1e-4] < by[.5] < by[1.] and by[None] < 1
    from moe_lab.plan import _kept_flops
    from moe_lab.sim.workload import train_flops
    assert _kept_flops(SMALL, 1024, None) == _kept_flops(SMALL, 1024, 4.) == train_flops(SMALL, 1024)
    assert _kept_flops(SMALL, 1024, .5) == train_flops(SMALL, 1024) - .5 * 6 * 4 * 2 * LAYER.expert()


def test_no_capacity_beyond_what_routing_can_fill(capsys):
    assert main(["which", "mixtral-8x7b", "nd_a100_v4:8", "--tokens", "1048576", "--imbalance", "8"]) == 0
    assert "a capacity of 4 that drops nothing" in capsys.readouterr().out


def test_latency_is_named_where_ports_stand_idle():
    t = plans(zoo["350M"], hgx_h100(128), top=1)[0].time
    assert t.limit == "grads (latency)" and t.port["grads", "latency"] > 9 * max(v for (p, l), v in t.port.items() if p == "grads" and l != "latency")


def test_command_line(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(dict(hidden_size=512, vocab_size=1000, num_attention_heads=8, num_hidden_layers=2, num_local_experts=8,
                                                          num_experts_per_tok=2, intermediate_size=1024)))
    (tmp_path / "mine.yaml").write_text(to_yaml(nd_a100_v4(2)))
    args = ["plan", str(tmp_path / "config.json"), str(tmp_path / "mine.yaml"), "--tokens", "65536", "--top", "2"]
    assert main(args) == 0
    assert "MFU" in capsys.readouterr().out
    assert main([*args, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert len(out["plans"]) == 2 and out["plans"][0]["limit"] and set(out["plans"][0]["bytes"]) <= {"node", "gpu"}


@pytest.mark.parametrize("args, says", [
    (["deepseek-v3", "nd_a100_v4:2", "--tokens", "65536"], "GB on each device"), (["gpt-9", "nd_a100_v4"], "model must be"), (["mixtral-8x7b", "mars"], "cluster must be"),
    (["mixtral-8x7b", "nd_a100_v4", "--tokens", "7"], "multiple"), (["mixtral-8x7b", "nd_a100_v4", "--top", "0"], "top must be"),
    (["mixtral-8x7b", "nd_a100_v4", "--imbalance", "0.5"], "imbalance"), (["mixtral-8x7b", "nd_a100_v4", "--imbalance", "1e300"], "imbalance")])
def test_impossible_requests_end_with_one_line(args, says, capsys):
    assert main(["plan", *args]) == 2
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err


def test_the_advice_is_right():
    "As many devices as the refusal names are enough, half as many are not."
    with pytest.raises(ValueError) as e: plans(zoo["Mixtral-8x7B"], nd_a100_v4(1), 2**15)
    n = int(str(e.value).split("fits on ")[1].split()[0])
    assert plans(zoo["Mixtral-8x7B"], nd_a100_v4(n // 8), 2**15)
    with pytest.raises(ValueError): plans(zoo["Mixtral-8x7B"], nd_a100_v4(n // 16), 2**15)


@pytest.mark.parametrize("name, nodes, sequences, imbalance", [("Qwen3-235B-A22B", 3, 24, 1.), ("Mixtral-8x22B", 1, 8, 2.), ("gpt-oss-120b", 1, 16, 1.), ("Qwen3-235B-A22B", 4, 32, 1.5)])
def test_advice_can_be_taken(name, nodes, sequences, imbalance):
    "The number of devices and the size of the step that a refusal names are then planned for."
    c = nd_a100_v4(nodes)
    with pytest.raises(ValueError, match="does not fit") as e: plans(zoo[name], c, sequences * 4096, imbalance=imbalance)
    advice = str(e.value).rsplit("; ", 1)[1]
    n = int(advice.split("fits on ")[1].split()[0])
    tokens = int(advice.split("step of ")[1].split()[0]) if "step of" in advice else sequences * 4096
    assert plans(zoo[name], nd_a100_v4(n // 8), tokens, imbalance=imbalance, top=1)[0].time.fits


def test_micro_batches_hold_whole_sequences():
    c = nd_a100_v4(2)
    for model, cluster, tokens, seq in ((SMALL, c, 2**18, 4096), (zoo["Mixtral-8x7B"], nd_a100_v4(8), 2**19, 2048)):
        found = plans(model, cluster, tokens, seq, top=50)
        assert all(tokens // cluster.num_devices // p.strategy.micro * p.strategy.tensor % seq == 0 for p in found)
    assert max(p.strategy.micro for p in found) > 1
    with pytest.raises(ValueError, match="whole sequence for each of 2 or more data parallel groups, 8192 tokens"): plans(SMALL, c, 4096)
    assert {p.strategy.tensor for p in plans(SMALL, c, 8192, top=50)} == {8}           # two sequences: one for each node


def test_many_layers_cost_what_their_kinds_cost():
    "10,000 layers and every strategy of 1,024 GPUs: 60 s and 8 s before."
    deep = replace(SMALL, layers=SMALL.layers * 2500)
    start = time.process_time()
    assert plans(deep, nd_a100_v4(128))[0].time.fits
    assert time.process_time() - start < 5
    [four], [eight] = (plans(replace(SMALL, layers=SMALL.layers * n, vocab=0), nd_a100_v4(1), 2**15, top=1) for n in (1, 2))
    assert eight.time.parts["experts"] == pytest.approx(2 * four.time.parts["experts"])


def test_why_more_devices_do_not_help():
    dense = Model("dense", (Layer(16384, Attention(128, 128, 8), 53248, glu=True),) * 126, 128256, tied=False)
    with pytest.raises(ValueError, match="pipeline parallelism") as e: plans(dense, nd_a100_v4(8), 2**22)
    assert "one layer" not in str(e.value) and "more such devices do not help" in str(e.value)
    with pytest.raises(ValueError, match="single sequence") as e: plans(zoo["OLMoE-1B-7B"], nd_a100_v4(1), 2**23, seq=2**22)


def test_where_tokens_stay_nothing_is_uneven():
    c = nd_a100_v4(1)
    even, hot = ({p.strategy: p for p in plans(SMALL, c, 2**17, imbalance=i, top=50)} for i in (1., 3.))
    home = [s for s in even if s in hot and (s.expert == 1 or s.r == 0)]
    assert home and all(even[s] == hot[s] for s in home)
    away = [s for s in even if s in hot and s.expert > 1 and s.r and not s.recompute]
    assert away and all(hot[s].time.seconds > even[s].time.seconds and hot[s].time.used > even[s].time.used for s in away)


def test_dense_models_and_few_experts():
    c = nd_a100_v4(2)
    dense = Model("dense", (Layer(512, Attention(8, 64), 2048),) * 4, 1000)
    assert {p.strategy.expert for p in plans(dense, c, 2**16)} == {1}
    few = Model("few", (replace(LAYER, experts=2),) * 4, 1000)
    assert {p.strategy.expert for p in plans(few, c, 2**16, top=50)} >= {1, 2, 4, 16}
    assert Strategy(expert=16, r=4) in {replace(s, recompute=False) for s in sizes(few, c)}


def test_which_explains(capsys):
    from moe_lab.which import which
    with pytest.raises(ValueError, match="experts"): which("350M", "nd_a100_v4:1")
    with pytest.raises(ValueError, match="imbalance must be finite and in \\[1, 1e\\+06\\], got 0.5"): which("OLMoE-1B-7B", "h200_nvlink", tokens=2**16, imbalance=.5)
    which("Mixtral-8x7B", "h200_nvlink", tokens=2**17)
    out = capsys.readouterr().out
    assert "balanced placement" in out and "at most" in out and "nothing to gain" in out
