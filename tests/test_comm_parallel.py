"""Expert parallelism on several ranks equals one process; faults end fast and name the rank."""
import json, math, os, random, signal, subprocess, sys, textwrap, time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from moe_lab.cluster.groups import grid
from moe_lab.cluster.launch import RankError, rank_device, step
from moe_lab.comm.checkpoint import export_safetensors, import_safetensors, load, pieces, save, steps
from moe_lab.comm.gradients import check_copies, clip_grad_norm, ddp, distinct_seed, expert_parameters, fsdp, grad_norm, reduce_gradients
from moe_lab.comm.parallel import ExpertParallel
from moe_lab.comm.switch import Switchable, cut, strategy_cost, switch
from moe_lab.core.types import dispatch
from moe_lab.experts.dispatch import decode, encode
from moe_lab.experts.layer import Local, MoE
from moe_lab.routing.capacity import capacity_for, drop_priority, fill_lost

f64 = torch.float64


def agreed(C, policy="position", lost="zero"):
    "One process that drops as the ranks do: each batch by itself, with the capacity that all agreed on."
    def exchange(x, r, experts):
        d = dispatch(r.expert, r.num_experts, C, drop_priority(r, policy))
        y = decode(experts(encode(x, d).view(r.num_experts, C, x.shape[1])).flatten(0, 1), d, r.weight)
        return fill_lost(y, x, d, lost), d
    return exchange


def differences(make_exchange, E, tokens, k=2, mask=False, capacity_factor=None, D=8, F=16, **kw):
    "Largest difference to one process in output, input gradient, router and expert gradients."
    r, W, k = dist.get_rank(), dist.get_world_size(), min(k, E)
    ex = make_exchange()
    build = lambda exchange: (torch.manual_seed(1), MoE(D, F, E, k, exchange=exchange, bias=True, **kw).to(rank_device(), f64))[1]
    moe, one = build(ex), build(Local())
    torch.manual_seed(2)
    xs, ws, masks = ([f(t).to(rank_device()) for t in tokens] for f in (lambda t: torch.randn(t, D, dtype=f64), lambda t: torch.randn(t, D, dtype=f64), lambda t: torch.rand(t) > .4))
    use = lambda i: masks[i] if mask else None
    x = xs[r].clone().requires_grad_()
    y, aux = moe(x, use(r))
    (y * ws[r]).sum().backward()
    dist.all_reduce(moe.gate.router.weight.grad)
    parts = [o.clone().requires_grad_() for o in xs]
    if capacity_factor is not None:
        m = ex.slices(E) if isinstance(ex, Switchable) else 1
        C = max(capacity_for(one.gate(p, use(i)), capacity_factor, multiple=m) for i, p in enumerate(parts))
        one.exchange = agreed(C, ex.policy, ex.lost)
    for i, (p, w) in enumerate(zip(parts, ws)): (one(p, use(i))[0] * w).sum().backward()
    assert aux.counts.equal(one(parts[r], use(r))[1].counts)
    part, s = (moe.experts.part, moe.experts.parts) if isinstance(ex, Switchable) else (0, 1)
    pairs = [(y, one(parts[r], use(r))[0]), (x.grad, parts[r].grad), (moe.gate.router.weight.grad, one.gate.router.weight.grad)]
    pairs += [(p.grad, cut(n, q.grad[list(moe.experts.ids)], part, s, 2)) for (n, p), q in zip(moe.experts.named_parameters(), one.experts.parameters())]
    return max([(a - b).abs().max().item() for a, b in pairs if a.numel()], default=0.)


@pytest.mark.parametrize("tokens", [[0, 3], [1, 7], [0, 0], [4, 4]])                   # D10
def test_token_counts(ranks, tokens):
    assert max(ranks.run(lambda: differences(lambda: ExpertParallel(grid()), 5, tokens), n=2)) < 1e-12


def sweep(seeds, W):
    "Random layers: E, k, tokens, padding, capacity, algorithm, gate order; all equal to one process."
    for seed in seeds:
        rnd = random.Random(seed)
        E = rnd.choice([1, 2, 3, 5, 8])
        f = rnd.choice([None, None, 0., .5, 1.25])
        make = lambda: ExpertParallel(grid(node=W // 2, gpu=2) if W % 2 == 0 else grid(), f, policy=rnd.choice(["position", "batch"]) if W == 3 else "position",
                                      lost=["zero", "pass"][seed % 2], algo=["linear", "hierarchical"][seed % 2])
        d = differences(make, E, [rnd.choice([0, 1, 4, 9]) for _ in range(W)], k=rnd.choice([1, 2, E]), mask=rnd.random() < .5, capacity_factor=f)
        assert d < 1e-12, (seed, E, f, d)
    return True

@pytest.mark.parametrize("W", [2, 3, 4])
def test_equal_to_one_process(ranks, W): assert all(ranks.run(sweep, range(W * 10, W * 10 + 8), W, n=W))

@pytest.mark.slow
def test_equal_to_one_process_on_eight(ranks8):
    ranks8.run(sweep, range(20), 8)
    assert max(ranks8.run(lambda: differences(lambda: ExpertParallel(grid()), 30, [3] * 8))) < 1e-12     # D09


def test_gradcheck(ranks):
    "Against finite differences, through both all-to-alls, for both exchanges."
    def check():
        for ex in (ExpertParallel(grid()), Switchable(grid(), 2), Switchable(grid(), 0, 1.)):
            torch.manual_seed(0)
            moe = MoE(4, 4, 2, 1, exchange=ex).to(f64)
            x = torch.randn(3, 4, dtype=f64) + dist.get_rank()
            torch.autograd.gradcheck(lambda x: moe(x)[0], x.requires_grad_())
        return True
    assert ranks.run(check) == [True] * 4


def switched(E, W, fs):
    for f in fs:
        s = max(1, W // E)
        for r in [0] + [r for r in range(1, s + 1) if s % r == 0]:
            d = differences(lambda: Switchable(grid(), r, f), E, [5, 0, 7, 2, 1, 1, 3, 4][:W], capacity_factor=f)
            assert d < 1e-12, (E, f, r, d)
    return True

def test_switch_two_ranks_one_expert(ranks): assert all(ranks.run(switched, 1, 2, (None, .5, 0.), n=2))
def test_switch_more_experts_than_ranks(ranks): assert all(ranks.run(switched, 5, 3, (None, 1.), n=3))

@pytest.mark.slow
def test_switch_eight_ranks_two_experts(ranks8): assert all(ranks8.run(switched, 2, 8, (None, .5)))


def test_switch_refuses_before_it_changes_anything(ranks):
    def bad():
        model = nn.ModuleList([MoE(8, 16, 4, 1, exchange=Switchable(grid(), 1)), MoE(8, 16, 1, 1, exchange=Switchable(grid(), 1))])
        try: switch(model, 2)
        except ValueError: return [m.exchange.r for m in model]
    assert ranks.run(bad) == [[1, 1]] * 4


def test_low_precision_and_autocast(ranks):
    def run():
        torch.manual_seed(0); moe = MoE(8, 16, 4, 2, exchange=ExpertParallel(grid()))
        x = torch.randn(6, 8)
        with torch.autocast("cpu", torch.bfloat16): y, _ = moe(x)
        y.float().pow(2).sum().backward()
        z, _ = moe.bfloat16()(x.bfloat16())
        return y.dtype, z.dtype, ((z.float() - y.float()).abs().max() / y.abs().max()).item() < .05, moe.experts.up.grad.dtype
    assert all(o[2] for o in ranks.run(run, n=2))


# Gradients, norms, copies ------------------------------------------------------------------------------------------

class Model(nn.Module):
    def __init__(self, exchange=None, E=4, D=6):
        super().__init__()
        self.inp, self.a, self.b, self.out = nn.Linear(D, D), MoE(D, 8, E, 2, exchange=exchange), MoE(D, 4, E, 1, exchange=exchange), nn.Linear(D, 1)
    def forward(self, x):
        x = self.inp(x)
        for m in (self.a, self.b):
            y, aux = m(x)
            x = x + y
        return self.out(x).pow(2).sum()


def trained(how, ep, steps=3, clip=.5, batches=4):
    "Norms of some steps with clipping; equal for any wrapper on `batches` ranks and, how='one', for one process."
    W, r = dist.get_world_size() if dist.is_initialized() else 1, dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = Model(None if how == "one" else ExpertParallel(grid(ep=ep))).to(rank_device(), f64)
    wrapped = {"ddp": ddp, "fsdp": fsdp}.get(how, lambda m: m)(model)
    whole = [p for p in wrapped.parameters() if not isinstance(p, DTensor)]                 # `fsdp`: a group of their own
    opt, norms = torch.optim.AdamW([dict(params=g) for g in (whole, [p for p in wrapped.parameters() if isinstance(p, DTensor)]) if g], lr=.05), []
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.randn(12, 6, dtype=f64).to(rank_device())
        opt.zero_grad()
        (wrapped(x) / batches if how == "one" else wrapped(x.view(W, -1, 6)[r])).backward()
        if how == "one": norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        else:
            reduce_gradients(wrapped, dense=how == "plain")
            norms.append(clip_grad_norm(wrapped, clip).item())
        opt.step()
    if how != "one": check_copies(model)
    return norms

def test_training_with_clipping_is_the_same_everywhere(ranks):
    "S02, S04, D02: the norms of three clipped steps, which depend on every gradient before them."
    want = trained("one", 1)
    assert max(want) > .5                                                                # something is clipped
    for how in ("plain", "ddp", "fsdp"):
        for ep in (4, 2):
            for norms in ranks.run(trained, how, ep): assert norms == pytest.approx(want, rel=1e-10), (how, ep)


def test_unused_everywhere_stays_none_and_unused_here_becomes_zero(ranks):
    def run():
        m = Model(ExpertParallel(grid()))
        m.extra, m.other = nn.Linear(2, 1), nn.Linear(2, 1)
        loss = m(torch.randn(4, 6))
        if dist.get_rank() == 1: loss = loss + m.extra(torch.ones(2)).sum()
        loss.backward(); reduce_gradients(m)
        return m.extra.weight.grad.tolist(), m.other.weight.grad
    assert ranks.run(run, n=2) == [([[.5, .5]], None)] * 2


def test_accumulated_gradients_are_reduced_once(ranks):
    def run():
        out = []
        for parts in (1, 2):
            torch.manual_seed(0); m = Model(ExpertParallel(grid())).to(f64)
            torch.manual_seed(dist.get_rank() + 1); x = torch.randn(8, 6, dtype=f64)
            for o in x.chunk(parts): m(o).backward()
            reduce_gradients(m); out.append(grad_norm(m).item())
        return abs(out[0] - out[1]) < 1e-10
    assert all(ranks.run(run))


def test_rank_without_experts_or_gradients_knows_the_norm(ranks):                       # S02
    def run():
        m = MoE(6, 8, 3, 1, exchange=ExpertParallel(grid()))                             # rank 3 has no expert
        for p in m.experts.parameters(): p.grad = torch.full_like(p, dist.get_rank() + 1.)
        return round(grad_norm(m).item() ** 2), round(grad_norm(m, float("inf")).item()), list(m.exchange.ids(3))
    n = 6 * 16 + 6 * 8
    assert [o[:2] for o in ranks.run(run)] == [(n * (1 + 4 + 9), 3)] * 4


@pytest.mark.parametrize("bad", [-1., math.nan, math.inf, "1"])
def test_no_norm_to_clip_to(bad):
    m = nn.Linear(2, 2); m.weight.grad = torch.ones(2, 2)
    with pytest.raises((TypeError, ValueError), match="max_norm must be"): clip_grad_norm(m, bad)
    assert (m.weight.grad == 1).all()


def test_noise_differs_between_ranks_and_not_between_runs(ranks):
    def run():
        torch.manual_seed(7); drop = nn.Dropout(.5)
        distinct_seed(7)
        return drop(torch.ones(64)).tolist()
    a = ranks.run(run)
    assert a == ranks.run(run) and len({tuple(o) for o in a}) == 4


@pytest.mark.parametrize("kind", [ExpertParallel, Switchable])
@pytest.mark.parametrize("bad", [dict(policy="no"), dict(rule="no"), dict(lost="no"), dict(algo="no"), dict(multiple=-4), dict(capacity_factor="1"), dict(capacity_factor=math.nan)])
def test_an_exchange_refuses_what_it_could_not_do(kind, bad):
    with pytest.raises((TypeError, ValueError), match="factor" if "capacity_factor" in bad else next(iter(bad))): kind(None, **bad)


def test_a_strategy_needs_ranks_and_experts():
    for bad in (("DP+MP", 1, 1, 0, 1), ("EP+MP", 1, 1, 4, 0), ("DP", -1, 1, 4, 1), ("DP", 1, math.nan, 4, 1), ("no", 1, 1, 4, 1)):
        with pytest.raises(ValueError, match="must be"): strategy_cost(*bad)


# Checkpoints --------------------------------------------------------------------------------------------------------

class One(nn.Module):
    def __init__(self, E, exchange=None):
        super().__init__()
        self.moe = MoE(4, 8, E, 1, exchange=exchange, bias=True)


def fill(model):
    "Every number of expert e becomes e + 1, so that a wrong expert shows."
    with torch.no_grad():
        for p in model.moe.experts.parameters():
            for e, row in zip(model.moe.experts.ids, p): row.fill_(e + 1)
    return model

def save_filled(root, E, n): save(root, n, fill(One(E, ExpertParallel(grid())).to(rank_device())))
def load_values(root, E, make, n):
    model = One(E, make()).to(rank_device()); load(root, model, step=n)
    return [(list(model.moe.experts.ids), [sorted(set(p[i].flatten().tolist())) for p in model.moe.experts.parameters() for i in range(len(p))])]

@pytest.mark.parametrize("W,E,W2", [(4, 4, 1), (3, 5, 4), (2, 6, 3)])
def test_each_rank_gets_its_own_experts(ranks, tmp_path, W, E, W2):                      # X02, X03
    ranks.run(save_filled, tmp_path, E, 1, n=W)
    for (ids, values), in ranks.run(load_values, tmp_path, E, lambda: ExpertParallel(grid()), 1, n=W2):
        assert values == [[e + 1.] for _ in range(4) for e in ids]


@pytest.mark.slow
def test_sixty_experts_on_two_ranks(ranks, tmp_path):                                    # X02
    ranks.run(save_filled, tmp_path, 60, 1, n=4)
    out = ranks.run(load_values, tmp_path, 60, lambda: ExpertParallel(grid()), 1, n=2)
    assert out[1][0][0] == list(range(30, 60)) and out[1][0][1][:30] == [[e + 1.] for e in range(30, 60)]


# (ranks, experts over so many of them, r where ranks share an expert), for two experts
LAYOUTS = [(1, 1, None), (2, 2, None), (2, 1, None), (3, 3, None), (4, 2, None), (4, 4, None), (8, 2, None), (8, 8, None),
           (2, 2, 0), (4, 4, 0), (4, 4, 1), (4, 4, 2), (8, 8, 0), (8, 8, 2), (8, 8, 4)]

class Small(One):
    def forward(self, x): return self.moe(x)[0].pow(2).mean()

def after_a_step(seed, ep, r):
    "A model in this layout and its optimizer, after a step on the same 24 tokens whatever the layout."
    W = dist.get_world_size()
    torch.manual_seed(seed); m = Small(2, ExpertParallel(grid(ep=ep)) if r is None else Switchable(grid(), r)).to(f64)
    opt = torch.optim.AdamW(m.parameters(), lr=.01)
    torch.manual_seed(seed + 1); m(torch.randn(24, 4, dtype=f64).view(W, -1, 4)[dist.get_rank()]).backward()
    reduce_gradients(m); opt.step()
    return m, opt

def write_layout(root, n, ep, r): save(root, n, *after_a_step(0, ep, r))
def read_layouts(root, files, ep, r):
    "A model with other numbers loads each file, learns from its own gradients, and says what it then gives."
    (m, opt), x, out = after_a_step(7, ep, r), torch.randn(24, 4, dtype=f64, generator=torch.Generator().manual_seed(5)), []
    for n in files:
        load(root, m, opt, step=n)
        opt.step()
        with torch.no_grad(): out.append(m(x).item())
    return out

@pytest.mark.slow
def test_every_layout_opens_what_every_other_wrote(ranks8, tmp_path):                   # X03
    for n, (W, ep, r) in enumerate(LAYOUTS): ranks8.run(write_layout, tmp_path, n, ep, r, n=W)
    want = None
    for W, ep, r in LAYOUTS:
        for got in ranks8.run(read_layouts, tmp_path, range(len(LAYOUTS)), ep, r, n=W):
            want = want or got[0]
            assert got == pytest.approx([want] * len(LAYOUTS), rel=1e-12), (W, ep, r)


def test_fsdp_checkpoint_opens_without_it(ranks, tmp_path):
    def write(root):
        torch.manual_seed(3); m = Model(ExpertParallel(grid(ep=2)))
        opt = torch.optim.AdamW(fsdp(m).parameters(), lr=.1)
        m(torch.ones(4, 6)).backward(); reduce_gradients(m, dense=False); opt.step()
        save(root, 1, m, opt)
        return {k: v.full_tensor().flatten()[:3].tolist() if hasattr(v, "full_tensor") else v.flatten()[:3].tolist() for k, v in pieces(m).items()}
    wrote = ranks.run(write, str(tmp_path))
    m = Model(); opt = torch.optim.AdamW(m.parameters())
    load(tmp_path, m, opt)
    mine = {k: v.flatten()[:3].tolist() for k, v in pieces(m).items()}
    for rank in wrote:
        for k, v in rank.items(): assert mine[k] == v, k
    assert opt.state[m.a.experts.up]["exp_avg"].shape == m.a.experts.up.shape and opt.param_groups[0]["lr"] == .1


def test_missing_and_extra_tensors_are_named(tmp_path):                                 # X05
    torch.manual_seed(0); m = Model(); save(tmp_path, 1, m); before = [p.clone() for p in m.parameters()]
    class Other(Model):
        def __init__(self): super().__init__(); self.gate_experts_mask = nn.Parameter(torch.ones(2)); del self.out; self.out = nn.Linear(6, 1, bias=False)
    with pytest.raises(ValueError, match=r"lacks gate_experts_mask; the model has no out.bias"): load(tmp_path, Other())
    with pytest.raises(ValueError, match="without an optimizer"): load(tmp_path, m, torch.optim.AdamW(m.parameters()))
    opt = torch.optim.AdamW(m.parameters()); m(torch.ones(1, 6)).backward(); opt.step(); save(tmp_path, 2, m, opt)
    n = Model(E=3)
    with pytest.raises(ValueError, match=r"the model has no .*optimizer"): load(tmp_path, n, torch.optim.AdamW(n.parameters()))
    m = Model(); load(tmp_path, m, step=1)
    assert all(torch.equal(a, b) for a, b in zip(before, m.parameters()))
    export_safetensors(tmp_path / "step-00000001", tmp_path / "m.safetensors")
    torch.manual_seed(1); n = Model(); import_safetensors(tmp_path / "m.safetensors", n)
    assert all(torch.equal(a, b) for a, b in zip(before, n.parameters()))
    with pytest.raises(ValueError, match="lacks gate_experts_mask"): import_safetensors(tmp_path / "m.safetensors", Other())


def test_a_step_is_a_number_and_its_folder_complete(tmp_path):
    m = One(2)
    for bad in (-1, 10**8, 1.5, True):
        with pytest.raises((TypeError, ValueError), match="step must be"): save(tmp_path, bad, m)
    save(tmp_path, 60, m)
    for name in ("step-50", "step-60", "step-00000050", "step-00000070.partial"): (tmp_path / name).mkdir()
    assert steps(tmp_path) == [60] and load(tmp_path, m) == {}


def test_extra_that_json_cannot_hold_is_refused_before_anything_is_written(ranks, tmp_path):
    with pytest.raises(RankError) as e: ranks.run(lambda: save(tmp_path, 1, One(2), extra={"a": {1}}), n=2, timeout=20)
    assert len(e.value.failures) == 2 and all("extra and the optimizer" in f for f in e.value.failures.values()) and not any(tmp_path.iterdir())


def test_another_optimizer_is_named(tmp_path):
    m, other = One(2), One(2)
    foreign = torch.optim.AdamW(other.parameters())
    with pytest.raises(ValueError, match="optimizer must be one of this model"): save(tmp_path, 1, m, foreign)
    save(tmp_path, 1, m, torch.optim.AdamW(m.parameters()))
    with pytest.raises(ValueError, match="optimizer must be one of this model"): load(tmp_path, m, foreign)
    with pytest.raises(ValueError, match="optimizer must be AdamW as in .*, got SGD"): load(tmp_path, m, torch.optim.SGD(m.parameters()))


def test_integers_and_names_without_experts_are_refused(tmp_path):
    m = One(2); before = [p.clone() for p in m.parameters()]
    save_file({k: v.long() for k, v in m.state_dict().items()}, tmp_path / "whole.safetensors")
    with pytest.raises(ValueError, match="only one of the two has floating-point numbers in moe"): import_safetensors(tmp_path / "whole.safetensors", m)
    assert all(torch.equal(a, b) for a, b in zip(before, m.parameters()))
    about = save(tmp_path, 1, m) / "extra.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"stacks": {"moe.missing": "up"}}))
    with pytest.raises(ValueError, match="all experts of moe.missing"): export_safetensors(about.parent, tmp_path / "out.safetensors")


# Faults -------------------------------------------------------------------------------------------------------------

def step_with_a_death(where, root):
    "One training step in which rank 1 is killed: in the expert computation of the forward or backward pass, or as it writes its part of a checkpoint."
    m = Model(ExpertParallel(grid())).to(rank_device())
    load(root, m)
    die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1:
        if where == "forward": m.b.experts.register_forward_pre_hook(die)
        elif where == "backward": m.b.experts.up.register_hook(die)
        else: dcp.FileSystemWriter.write_data = die              # of this process, which ends by it
    step("forward"); loss = m(torch.ones(4, 6, device=rank_device()))
    step("backward"); loss.backward()
    save(root, 2, m)                                            # notes its step itself

@pytest.mark.parametrize("where", ["forward", "backward", "save step 2"])
def test_killed_rank(ranks, tmp_path, where, record_property):
    torch.manual_seed(0); m = Model(); save(tmp_path, 1, m)
    ranks.run(dist.get_rank, n=3)                               # whoever died before is replaced: not a part of the time below
    t = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 3 was killed by SIGKILL") as e: ranks.run(step_with_a_death, where, tmp_path, n=3, timeout=10)
    assert time.monotonic() - t < 25 and e.value.rank == 1 and e.value.step == where
    assert set(e.value.failures) | set(e.value.running) == {0, 1, 2}
    record_property("faults", 1)
    assert steps(tmp_path) == [1] and load(tmp_path, Model()) == {}


@pytest.mark.slow
def test_torchrun_names_the_killed_rank(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent("""
        import datetime, os, signal, torch, torch.distributed as dist
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
        from moe_lab.cluster.groups import grid
        from moe_lab.comm.parallel import ExpertParallel
        from moe_lab.experts.layer import MoE
        moe = MoE(8, 16, 4, 2, exchange=ExpertParallel(grid()))
        for i in range(100):
            if i == 3 and dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
            moe(torch.randn(5, 8))[0].sum().backward()
    """))
    t = time.monotonic()
    out = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29561", str(script)],
                         env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, timeout=120)
    assert out.returncode and time.monotonic() - t < 100
    assert "Signal 9 (SIGKILL)" in out.stderr and "rank      : 1" in out.stderr
