"""Text from trained models through the command line, bad requests, broken weights, the decoders' own limits."""
import math

import pytest
import torch

from moe_lab.inference.generate import GPTDecoder, Sampling, generate, stream
from moe_lab.inference.step import alone, fits
from moe_lab.core.backend import use
from moe_lab.models.gpt import GPT, GPTConfig, KVCache

DEV = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = GPTConfig(40, d_model=64, num_layers=2, num_heads=2, d_hidden=16, experts=4, top_k=2)


def model(**kw): return (torch.manual_seed(0), GPT(GPTConfig(**{**CONFIG.__dict__, **kw})).eval().to(DEV))[1]


def test_a_trained_run_writes_text_from_the_command_line(tmp_path, capsys):
    from moe_lab.cli import main as cli                     # not above: a GPU machine may lack what the command line needs
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.py").write_text("def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n" * 60)
    code = cli(["train", "--data", str(folder), "--out", str(tmp_path / "run"), "--steps", "3", "--batch", "2", "--context", "16", "--vocab", "300", "--d_model", "16",
                "--layers", "2", "--heads", "2", "--d_hidden", "16", "--experts", "2"])
    assert not code, capsys.readouterr().err
    capsys.readouterr()
    said = []
    for seed in ("1", "1", "2"):
        assert not cli(["generate", str(tmp_path / "run"), "--prompt", "def ", "--max_new", "12", "--seed", seed, "--device", "cpu"])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2] and all(s.startswith("def ") and len(s) > 6 for s in said)
    assert cli(["generate", str(tmp_path / "run"), "--prompt", "", "--device", "cpu"]) == 2 and "prompt" in capsys.readouterr().err
    for wrong, why in ((["--prompt", "def " * 40], "context of 16"), (["--max_new", "17"], "exceed the context of 16"), (["--max_new", "0"], "max_new"), (["--temperature", "-1"], "temperature"),
                       (["--seed", str(10**23)], "seed"), (["--device", "foo"], "device must be"), (["--device", "cuda:9"], "not here")):
        assert cli(["generate", str(tmp_path / "run"), *wrong]) == 2
        said = capsys.readouterr()
        assert why in said.err and said.out == ""
    assert not cli(["generate", str(tmp_path / "run"), "--device", "cpu"])          # as much as the context holds
    assert cli(["generate", str(tmp_path), "--device", "cpu"]) == 2 and "checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("prompts,kw,why", [([], {}, "at least one request"), ([[1], []], {}, "prompt 1 is empty"), ([[1, 40]], {}, "token id 40 is outside the vocabulary of 40"),
                                            ([[-1]], {}, "token id -1"), ([[1.5]], {}, "token id 1.5 is outside"), ([[1] * 6], dict(context=8), "prompt 0 of 6 tokens and max_new=4 exceed the context of 8"), ([[1]], dict(max_new=0), "max_new"), ([[1]], dict(max_new=2.5), "max_new must be an int"), (["ab"], {}, "prompt 0 must be a list"),
                                            ([1, 2], {}, "prompt 0 must be a list"), ([[math.nan]], {}, "token id nan"), ([[True]], {}, "token id True")])
def test_bad_requests_are_refused_before_anything_runs(prompts, kw, why):
    m = model()
    m.forward = m.features = None                                                # would fail if it ran
    with pytest.raises((ValueError, TypeError), match=why.replace("(", r"\(")): generate(m, prompts, **{"max_new": 4, **kw})


@pytest.mark.parametrize("where", ["embed.weight", "blocks.1.ffn.experts.down", "blocks.0.ffn.gate.router.weight", "norm.weight"])
def test_weights_that_are_not_finite_are_named(where):                            # a router's would not show in any logit
    m = model()
    with torch.no_grad(): m.get_parameter(where).view(-1)[-1] = math.nan
    with pytest.raises(FloatingPointError, match=f"weight {where} is not finite"): generate(m, [[1, 2], [3]], 3)


@pytest.mark.parametrize("body", ["torch", "triton"])
def test_logits_that_are_not_finite_name_request_and_step(body):
    m = model()
    with torch.no_grad(): m.norm.weight.fill_(3e38)                 # finite, and its products are not
    with use(body), pytest.raises(FloatingPointError, match="request 0, step 0"): generate(m, [[1, 2], [3]], 3)


def test_no_temperature_is_too_low():                                            # logits over 1e-40 would be inf, and inf over inf the first token
    m = model()
    assert generate(m, [[1, 2]], 4, Sampling(temperature=1e-40)) == generate(m, [[1, 2]], 4, Sampling(temperature=0))


def test_one_broken_request_does_not_spoil_the_others_step_message():
    m = model()
    with torch.no_grad(): m.embed.weight[7] = math.inf
    with pytest.raises(FloatingPointError): generate(m, [[1], [7]], 2)


def test_a_model_in_training_stays_so():
    m = model().train()
    assert generate(m, [[1, 2]], 2) and m.training and m.blocks[0].training


def test_fused_steps_write_the_same_text():
    m = model(num_kv_heads=1, experts=(0, 4))
    with use("torch"): want = generate(m, [[1, 2, 3], [7]], 5, Sampling(temperature=.7, seed=2))
    with use("triton"):
        assert fits(m, 2) and type(GPTDecoder(m, 2, 8)._step).__name__ == "FusedStep"
        assert generate(m, [[1, 2, 3], [7]], 5, Sampling(temperature=.7, seed=2)) == want


@pytest.mark.parametrize("kw", [dict(num_heads=4), dict(residual="mix"), dict(capacity_factor=2.)])
def test_what_does_not_fit_takes_the_models_own_forward(kw):
    with use("triton"): assert not fits(model(**kw), 1)
    assert alone(model(**kw)) and len(generate(model(**kw), [[1]], 2)[0]) == 2


def test_a_full_cache_says_so():
    d = GPTDecoder(model(), 1, 3)
    ids = torch.tensor([[1, 2, 3]], device=DEV)
    d.start(ids, torch.ones_like(ids, dtype=torch.bool))
    with pytest.raises(ValueError, match="cache has room for 3 tokens, 4 are needed"): d.step(torch.tensor([1], device=DEV))


@pytest.mark.gpu
def test_a_captured_step_writes_the_same_text():
    m = model().cuda()
    with use("torch"): want = generate(m, [[1, 2, 3], [7]], 8, Sampling(temperature=0))
    assert generate(m, [[1, 2, 3], [7]], 8, Sampling(temperature=0)) == want
