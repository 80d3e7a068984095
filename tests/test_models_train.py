"""models.train: a real process killed with SIGKILL, files that are cut short or foreign, and that no step depends on history."""
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_lab.cli import main
from moe_lab.models.corpus import load_corpus
from moe_lab.models.gpt import GPT, GPTConfig
from moe_lab.models.train import TrainConfig, evaluate, fit, lm_loss, load_checkpoint, load_run, lr_at, make_optimizer, read_configs, read_log, save_checkpoint, train_step

SMALL = GPTConfig(vocab_size=257, d_model=16, num_layers=1, num_heads=2, d_hidden=16)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("".join(f"{i} plus {i} is {2 * i}\n" for i in range(3000)))
    return path


@pytest.fixture(scope="module")
def corpus(text): return load_corpus(text, vocab_size=257)


RUN = """
import sys
from moe_lab.models.corpus import load_corpus
from moe_lab.models.gpt import GPTConfig
from moe_lab.models.train import TrainConfig, fit
model = GPTConfig(vocab_size=257, d_model=16, num_layers=2, num_heads=2, d_hidden=16, experts=4, top_k=2)
fit(model, TrainConfig(steps=48, batch_size=2, context=32, eval_every=11, eval_windows=4, save_every=4, warmup=5), load_corpus(sys.argv[1], 257), sys.argv[2])
"""


def lines(folder): return [{k: v for k, v in o.items() if k != "seconds"} for o in read_log(folder / "log.jsonl")]


def test_kill_9_at_any_moment(text, tmp_path):
    start = lambda out: subprocess.Popen([sys.executable, "-c", RUN, str(text), str(out)], env={**os.environ, "TQDM_DISABLE": "1"})
    assert start(tmp_path / "whole").wait(120) == 0
    killed, out = 0, tmp_path / "killed"
    for steps in (1, 15, 34):                          # once it has come so far, it dies
        p = start(out)
        while p.poll() is None and (not (out / "log.jsonl").exists() or sum(b"loss" in o for o in (out / "log.jsonl").read_bytes().splitlines()) < steps): time.sleep(0.002)
        if p.poll() is None: p.send_signal(signal.SIGKILL); killed += 1
        p.wait(30)
    assert killed == 3 and start(out).wait(120) == 0
    assert lines(out) == lines(tmp_path / "whole")
    a, b = (load_file(o / "checkpoint.safetensors") for o in (out, tmp_path / "whole"))
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    assert sorted(f.name for f in out.iterdir()) == ["checkpoint.safetensors", "log.jsonl", "tokenizer.json"]


def test_a_finished_run_is_not_trained_again(corpus, tmp_path):
    c = TrainConfig(steps=3, batch_size=2, context=16, eval_windows=2)
    _, log = fit(SMALL, c, corpus, tmp_path)
    before = (tmp_path / "checkpoint.safetensors").stat().st_mtime_ns
    _, again = fit(SMALL, c, corpus, tmp_path, objective=None)
    assert again == log and (tmp_path / "checkpoint.safetensors").stat().st_mtime_ns == before


def test_foreign_and_broken_checkpoints(corpus, tmp_path):
    model = GPT(SMALL)
    opt, path = make_optimizer(model, TrainConfig()), tmp_path / "c.safetensors"
    model(torch.arange(4)[None])[0].sum().backward(), opt.step()
    save_checkpoint(path, model, opt, 1, TrainConfig())
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="no safetensors file"): read_configs(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="says nothing about"): read_configs(path)
    path.write_bytes(whole)
    tensors, meta = load_file(path), dict(step="1", model="{}", train="{}")
    name = "model.blocks.0.ffn.up"                 # X05: one gone, one renamed, one too many
    save_file({n: t for n, t in tensors.items() if n != name}, path, meta)
    with pytest.raises(ValueError, match="lacks weight 'blocks.0.ffn.up'"): load_checkpoint(path, model)
    save_file({**tensors, "model.extra": torch.zeros(1)}, path, meta)
    with pytest.raises(ValueError, match="unknown weight 'extra'"): load_checkpoint(path, model)
    save_file({n: t for n, t in tensors.items() if n != "adamw.blocks.0.ffn.up.step"}, path, meta)
    with pytest.raises(ValueError, match="lacks moments"): load_checkpoint(path, model, opt)
    with pytest.raises(FileNotFoundError, match="no checkpoint"): load_run(tmp_path / "none")


def test_checkpoint_holds_no_more_than_it_should(tmp_path):
    "X09: a view must not drag its buffer into the file."
    model = GPT(SMALL)
    opt = make_optimizer(model, TrainConfig())
    wide = torch.randn(257, 4096)
    model.embed.weight.data = wide[:, :16]
    save_checkpoint(tmp_path / "c.safetensors", model, opt, 0, TrainConfig())
    assert (tmp_path / "c.safetensors").stat().st_size < 1.1 * 4 * sum(p.numel() for p in model.parameters()) + 65536


def test_a_loss_that_is_not_finite_stops_and_leaves_the_checkpoint(corpus, tmp_path):
    c = TrainConfig(steps=9, batch_size=2, context=16, eval_windows=2, save_every=2)
    def broken(model, x, y, config, step):
        loss = model(x)[0].mean()
        return (loss * float("nan") if step == 5 else loss), {"loss": loss.detach()}
    with pytest.raises(FloatingPointError, match="step 5"): fit(SMALL, c, corpus, tmp_path, objective=broken)
    assert read_configs(tmp_path / "checkpoint.safetensors")[2] == 4
    assert read_log(tmp_path / "log.jsonl")[-1]["step"] == 4


def test_a_step_depends_on_weights_moments_and_its_number_only(corpus):
    "Noise drawn before a step must not show in it."
    x = torch.randint(257, (2, 9))
    batch, c = (x[:, :-1], x[:, 1:]), TrainConfig()
    def one(noise):
        torch.manual_seed(0)
        model = GPT(SMALL)
        opt = make_optimizer(model, c)
        for _ in range(noise): torch.rand(1)
        logs = [train_step(model, opt, batch, c, s, objective=lambda m, x, y, c, s: ((loss := (m(x)[0] * torch.rand(1)).square().mean()), {"loss": loss.detach()})) for s in range(3)]
        return [o["loss"].item() for o in logs]
    assert one(0) == one(3)


def test_weight_decay_touches_matrices_only():
    model = GPT(SMALL)
    decay, none = make_optimizer(model, TrainConfig()).param_groups
    assert {p.ndim for p in none["params"]} == {1} and all(p.ndim >= 2 for p in decay["params"])
    assert len(decay["params"]) + len(none["params"]) == len(list(model.parameters()))


def test_clip_bounds_the_update_and_reports_the_norm_before(corpus):
    torch.manual_seed(0)
    model, x = GPT(SMALL), torch.randint(257, (2, 9))
    big = lambda m, x, y, c, s: ((loss := 1e4 * m(x)[0].square().mean()), {"loss": loss.detach()})
    o = train_step(model, make_optimizer(model, TrainConfig()), (x[:, :-1], x[:, 1:]), TrainConfig(clip=0.5), 0, big)
    after = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert o["norm"] > 10 and abs(after - 0.5) < 1e-4


def test_balance_reaches_the_router_and_scales_with_its_coefficient(corpus):    # L08, L12
    torch.manual_seed(0)
    model, x = GPT(replace(SMALL, experts=4)).double(), torch.randint(257, (2, 9))
    def grad(balance, z, task):
        model.zero_grad()
        loss, log = lm_loss(model, x[:, :-1], x[:, 1:], TrainConfig(balance=balance, z=z))
        (loss if task else loss - lm_loss(model, x[:, :-1], x[:, 1:], TrainConfig(balance=0.))[0]).backward()
        return loss.item(), log, model.blocks[0].ffn.gate.router.weight.grad.clone()
    (a, log, one), (b, _, two), (off, _, none) = grad(.01, 0., False), grad(.02, 0., False), grad(0., 0., True)
    assert one.abs().sum() > 0 and torch.allclose(two, 2 * one, rtol=1e-6)
    assert abs(a - off - .01 * log["balance"].item()) < 1e-6 and abs(b - off - .02 * log["balance"].item()) < 1e-6
    with_z, _, pushed = grad(0., 1e-3, True)      # L17
    assert with_z > off and not torch.equal(pushed, none)


def test_schedule_ends_and_starts_where_it_says():
    for steps, warmup in ((1, 0), (1, 5), (7, 7), (10, 0)):
        c = TrainConfig(steps=steps, warmup=warmup, lr=2.)
        assert all(0 < lr_at(s, c) <= 2. for s in range(steps + 1))
    assert lr_at(0, TrainConfig(warmup=0, lr=2.)) == 2.


def test_evaluate_leaves_the_model_as_it_was(corpus):
    model = GPT(SMALL).train()
    a, b = (evaluate(model, corpus.valid, 32, batch_size=n, windows=10)["valid"] for n in (3, 32))
    assert model.training and abs(a - b) < 1e-6 and all(p.grad is None for p in model.parameters())


def test_command_line(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["moe-lab"])
    def run(*a):
        try: status = main(["train", *a])
        except SystemExit as e: status = e.code
        return status, capsys.readouterr()
    status, said = run("--help")
    assert not status and all(o in said.out for o in ("--data", "--top_k", "(default: 500)", "experts a token"))
    args = ["--out", str(tmp_path / "r"), "--layers", "1", "--d_model", "16", "--heads", "2", "--d_hidden", "16", "--experts", "0", "--vocab", "257", "--steps", "3", "--batch", "2", "--context", "16"]
    status, said = run("--data", str(text), *args)
    assert status == 0 and "validation loss" in said.out and len([o for o in read_log(tmp_path / "r" / "log.jsonl") if "loss" in o]) == 3
    assert json.loads((tmp_path / "r" / "tokenizer.json").read_text())
    for bad, word in ((["--data", str(tmp_path / "none")], "no file or folder"), (["--data", str(text), *args, "--lr", "1"], "another run"), (["--steps", "0"], "steps must be in [1,")):
        status, said = run(*bad)
        assert status == 2 and word in said.err and said.err.count("\n") == 1


def test_a_folder_belongs_to_one_text_and_its_log_has_no_hole(corpus, tmp_path):
    c = TrainConfig(steps=4, batch_size=2, context=16, eval_windows=2, save_every=2)
    fit(SMALL, c, corpus, tmp_path)
    with pytest.raises(ValueError, match="other text"): fit(SMALL, c, replace(corpus, train=corpus.train.flip(0)), tmp_path)
    log = tmp_path / "log.jsonl"
    whole = log.read_text().splitlines(True)
    for damaged in ([], whole[2:], whole[:2] + ["\n"] + whole[2:], whole * 2):
        log.write_text("".join(damaged))
        with pytest.raises(ValueError, match="log.jsonl"): fit(SMALL, c, corpus, tmp_path)


@pytest.mark.parametrize("options, said", [(["--device", "bogus"], "device must be"), (["--device", "cuda:99"], "not here"), (["--lr", "inf"], "lr must be finite")])
def test_command_line_says_what_is_wrong_before_it_reads(options, said, capsys):
    assert main(["train", *options]) == 2
    out = capsys.readouterr()
    assert said in out.err and not out.out


def test_experts_in_no_layer_are_no_plan(capsys):
    from moe_lab.cli import main as cli
    assert cli(["train", "--experts", "8", "--moe_every", "9", "--layers", "4"]) == 2 and "moe_every must be in [1, 4]" in capsys.readouterr().err
    assert cli(["train", "--capacity_factor", "nan"]) == 2 and "capacity_factor must be finite" in capsys.readouterr().err
