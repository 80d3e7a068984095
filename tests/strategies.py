"""What the fuzzers draw, and what they hold: a `Problem` is a few numbers and names, small to print; each check builds it on a
device, runs one operator forward and backward in the body under test, compares every result with the float64 plain body, and returns how many
numbers it compared: an example that compared none is not one."""
import math
import os
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, wraps

os.environ.setdefault("TRITON_INTERPRET", "1" if not __import__("torch").cuda.is_available() else "0")

import torch
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from moe_lab.core.backend import use
from moe_lab.core.types import dispatch
from moe_lab.experts.activation import ACTIVATIONS
from moe_lab.experts.blocksparse import blocksparse_mlp
from moe_lab.experts.decode import decode_experts, decode_gate
from moe_lab.experts.dispatch import decode, encode
from moe_lab.experts.grouped import expert_mlp, grouped_moe
from moe_lab.experts.layer import MoE
from moe_lab.experts.products import dds, dsd, sdd
from moe_lab.experts.topology import Matrix, topology_from_counts, topology_from_mask
from moe_lab.hybrid_ep import compress
from moe_lab.inference.generate import GPTDecoder
from moe_lab.models.gpt import GPT, GPTConfig
from moe_lab.routing.balance import losses, z_loss
from moe_lab.routing.capacity import capacity, drop_priority, rules
from moe_lab.routing.gate import TopKGate, softmax, topk

DEV = "cuda" if torch.cuda.is_available() else "cpu"
BODIES = {"torch": ["float64", "float32", "float16", "bfloat16"], "triton": ["float32", "float16"] + ["bfloat16"] * (DEV == "cuda")}
LIMIT = dict(float64=1e-10, float32=1e-4, float16=1e-2, bfloat16=6e-2)         # of the largest number of a result

ROUTES = ("even", "skewed", "one", "last", "alternate", "none")
LAYOUTS = ("packed", "strided", "transposed", "offset")
VALUES = ("normal", "nan", "zero", "tied")


@dataclass(frozen=True)
class Problem:
    T: int; D: int; F: int; E: int; k: int
    route: str = "even"                # how tokens are spread over experts
    none: float = 0.                   # share of assignments that have no expert
    capacity: int | None = None
    activation: str = "swiglu"
    bias: bool = False
    weighted: bool = True
    dtype: str = "float32"
    layout: str = "packed"             # how matrices lie in memory
    values: str = "normal"
    block: int = 16
    seed: int = 0


@st.composite
def problems(draw, dtypes, tokens=24, width=40, experts=6, blocks=(16, 32)):
    E = draw(st.integers(1, experts))
    T = draw(st.integers(0, tokens))
    return Problem(T, draw(st.integers(1, width)), draw(st.integers(1, width)), E, draw(st.integers(1, min(E, 4))), draw(st.sampled_from(ROUTES)),
                   draw(st.sampled_from((0., .3))), draw(st.none() | st.integers(0, T)), draw(st.sampled_from(sorted(ACTIVATIONS))), draw(st.booleans()),
                   draw(st.booleans()), draw(st.sampled_from(dtypes)), draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(VALUES)), draw(st.sampled_from(blocks)), draw(st.integers(0, 2**16)))


# --- a problem as tensors -------------------------------------------------------------------------------------------

def laid(t, layout):
    "The same numbers, in another place of memory."
    if t.ndim < 2 or layout == "packed": return t
    if layout == "transposed": return t.mT.contiguous().mT
    wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1] + 1), math.nan)
    view = wide[..., :-1:2] if layout == "strided" else wide[..., 1:1 + t.shape[-1]]
    view.copy_(t)
    return view


class Maker:
    def __init__(self, p):
        self.p, self.dtype, self.g = p, getattr(torch, p.dtype), torch.Generator().manual_seed(p.seed)

    def randn(self, *shape, scale=1., dtype=None):
        t = torch.randn(shape, generator=self.g, dtype=torch.float64) * scale
        if self.p.values == "zero": t *= 0
        if self.p.values == "tied": t = (2 * t).round() / 2
        return laid(t.to(dtype or self.dtype).to(DEV), self.p.layout)

    def tokens(self):
        x = self.randn(self.p.T, self.p.D)
        if self.p.values == "nan" and self.p.T: x[self.p.seed % self.p.T] = math.nan
        return x

    def expert(self):
        "(T,k) distinct ids of a token, some of them -1."
        T, E, k = self.p.T, self.p.E, self.p.k
        e = torch.arange(E, dtype=torch.float64)
        lean = dict(even=0 * e, skewed=-2. * e, one=-99. * e, last=99. * e, alternate=99. * (e % 2), none=0 * e)[self.p.route]
        ids = (lean + torch.randn(T, E, generator=self.g, dtype=torch.float64)).argsort(dim=1, descending=True, stable=True)[:, :k]
        drop = torch.rand(T, k, generator=self.g) < (1. if self.p.route == "none" else self.p.none)
        return laid(ids.masked_fill(drop, -1).to(DEV), "transposed" if self.p.layout == "transposed" else "packed")

    def weight(self, T, k): return laid((torch.rand(T, k, generator=self.g) - .2).to(DEV, torch.promote_types(self.dtype, torch.float32)), self.p.layout)

    def experts(self):
        p, h = self.p, ACTIVATIONS[self.p.activation].halves
        up, down = self.randn(p.E, h * p.F, p.D, scale=p.D ** -.5), self.randn(p.E, p.D, p.F, scale=p.F ** -.5)
        return (up, down, self.randn(p.E, h * p.F), self.randn(p.E, p.D)) if p.bias else (up, down, None, None)


# --- comparing ------------------------------------------------------------------------------------------------------

class Compared: numbers = 0


def counted(check):
    "A check that returns how many numbers it compared."
    @wraps(check)
    def run(p, body):
        Compared.numbers = 0
        check(p, body)
        return Compared.numbers
    return run


def same(got, want, what):
    assert got.equal(want), f"{what}: {got.tolist()}, expected {want.tolist()}"
    Compared.numbers += got.numel()


@contextmanager
def unwritten(nan):
    "Memory that nobody has written reads as NaN, if so asked (Z02)."
    torch.use_deterministic_algorithms(bool(nan), warn_only=True)
    try: yield
    finally: torch.use_deterministic_algorithms(False)


def results(f, tensors, body, p):
    "f(*tensors) and the gradients of those that exist, in one body; what comes from above is a number of the problem's dtype everywhere."
    args = [None if t is None else t.detach().clone(memory_format=torch.preserve_format).requires_grad_(t.is_floating_point()) for t in tensors]
    args = [a if t is None or a.stride() == t.stride() else t.detach().requires_grad_() for a, t in zip(args, tensors)]
    with use(body), unwritten(p.seed % 2): out = f(*args)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(p.seed), dtype=torch.float64).to(getattr(torch, p.dtype)).to(out)
    leaves = [a for a in args if a is not None]
    with use(body), unwritten(p.seed % 2): grads = torch.autograd.grad(out, leaves, g, allow_unused=True) if out.requires_grad else [None] * len(leaves)
    return [out.detach(), *grads]


def close(got, want, limit, what, doubt=None):
    """NaN where it is expected and nowhere else; each number within `limit` of the largest. Where terms cancel, that is too strict in half precision:
    `doubt()` then tells how far the float64 result moves when its inputs do by one rounding, and ten times that is allowed."""
    if want is None or got is None:
        assert got is None or not got.count_nonzero(), f"{what}: a gradient from nowhere"
        assert want is None or not want.count_nonzero(), f"{what}: a gradient is missing"
        return
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    Compared.numbers += got.numel()
    got, want = got.double(), want.double()
    assert got.isnan().equal(want.isnan()), f"{what}: NaN in {int(got.isnan().sum())} places, expected in {int(want.isnan().sum())}"
    worst, size = farthest(got, want), farthest(want, 0. * want)
    assert worst <= limit * size or doubt and worst <= 10 * doubt(), f"{what}: off by {worst:.3g}, largest {size:.3g}, limit {limit:g}, rounding of inputs moves it by {doubt and doubt()}"


def farthest(a, b): return (a - b).nan_to_num(0.).abs().max().item() if a.numel() else 0.


def rounding(f, p, *tensors):
    "How far each float64 result of f moves, at most over eight draws, when every number moves by up to one rounding of the problem's dtype."
    g, unit = torch.Generator().manual_seed(p.seed), torch.finfo(getattr(torch, p.dtype)).eps / 2
    shake = lambda t: t if t is None else t * (1 + unit * (2 * torch.rand(t.shape, generator=g, dtype=torch.float64) - 1).to(DEV))
    truth = f(*tensors)
    moved = [f(*map(shake, tensors)) for _ in range(8)]
    return [None if t is None else max(farthest(m[i], t) for m in moved) for i, t in enumerate(truth)]


def agree(f, tensors, p, body, names):
    "`f` on tensors of the problem's dtype in `body`, against float64 in plain PyTorch."
    wide = [None if t is None else t.double() for t in tensors]
    plain = lambda *ts: results(f, ts, "torch", p)
    got, want = results(f, tensors, body, p), plain(*wide)
    assert got[0].dtype == getattr(torch, p.dtype), f"y has dtype {got[0].dtype}"
    doubts = cache(lambda: rounding(plain, p, *wide))
    for i, (a, b, n) in enumerate(zip(got, want, ["y"] + [f"gradient of {n}" for n, t in zip(names, tensors) if t is not None])): close(a, b, LIMIT[p.dtype], n, lambda: doubts()[i])


# --- one check an operator ------------------------------------------------------------------------------------------

def check_encode(p, body):
    m = Maker(p)
    d, x = dispatch(m.expert(), p.E, p.capacity), m.tokens()
    agree(lambda x, w: encode(x, d, w), (x, m.weight(p.T, p.k) if p.weighted else None), p, body, ("x", "weight"))


def check_decode(p, body):
    m = Maker(p)
    d = dispatch(m.expert(), p.E, p.capacity)
    rows = p.T * p.k if p.capacity is None else p.E * p.capacity
    agree(lambda z, w: decode(z, d, w), (m.randn(rows, p.D), m.weight(p.T, p.k) if p.weighted else None), p, body, ("z", "weight"))


def check_grouped(p, body):
    m = Maker(p)
    ids = m.expert()
    d = None if p.capacity is None else dispatch(ids, p.E, p.capacity)
    agree(lambda x, w, up, down, bu, bd: grouped_moe(x, (ids, w), up, down, p.activation, bu, bd, d),
          (m.tokens(), m.weight(p.T, p.k), *m.experts()), p, body, ("x", "weight", "up", "down", "up_bias", "down_bias"))


def check_rows(p, body):
    m = Maker(p)
    offsets = dispatch(m.expert()[:, :1], p.E, p.capacity).offsets
    agree(lambda x, up, down, bu, bd: expert_mlp(x, offsets, up, down, p.activation, bu, bd), (m.tokens(), *m.experts()), p, body, ("rows", "up", "down", "up_bias", "down_bias"))


def check_blocksparse(p, body):
    m = Maker(p)
    d = dispatch(m.expert(), p.E, p.capacity)
    agree(lambda x, w, up, down: blocksparse_mlp(x, d, w, up, down, p.activation, p.block, sync=p.bias),
          (m.tokens(), m.weight(p.T, p.k), *m.experts()[:2]), p, body, ("x", "weight", "up", "down"))


def check_products(p, body):
    "SDD, DSD and DDS, plain and transposed, on an uneven block diagonal or on any pattern."
    m, B = Maker(p), p.block
    if p.weighted: topo = topology_from_counts(dispatch(m.expert(), p.E).counts, (1 + p.F % 2) * B, B)
    else: topo = topology_from_mask((torch.rand(1 + p.T % 3, 1 + p.E % 4, generator=m.g) < .6).to(DEV), B)
    (R, C), K = topo.shape, p.D
    if not R: return
    s = Matrix.from_dense(m.randn(R, C), topo)
    turn = (lambda s: s.T) if p.bias else (lambda s: s)
    rows, cols = turn(s).shape
    agree(lambda a, b: sdd(a, b, topo).to_dense(), (m.randn(R, K, scale=K ** -.5), m.randn(K, C)), p, body, ("a", "b"))
    agree(lambda data, b: dsd(turn(Matrix(data, topo)), b), (s.data, m.randn(cols, K, scale=C ** -.5)), p, body, ("data", "b"))
    agree(lambda a, data: dds(a, turn(Matrix(data, topo))), (m.randn(K, rows, scale=R ** -.5), s.data), p, body, ("a", "data"))


def check_step(p, body):
    "A generation step: logits against float64, ids by the rule from those logits, the table by a loop, the experts' sum against float64."
    m, T, E, k = Maker(p), p.T, p.E, p.k
    if not T: return
    x, router = m.tokens(), m.randn(E, p.D, scale=p.D ** -.5)
    gain, residual = m.randn(p.D) if p.bias else None, m.randn(T, p.D) if p.weighted else None
    (up, down), wide = m.experts()[:2], lambda t: None if t is None else t.double()
    with use(body):
        plan = decode_gate(x, router, k, gain=gain)
        y = decode_experts(x, plan, up, down, p.activation, gain, residual=residual)
    normed = wide(x) if gain is None else nn.functional.rms_norm(wide(x), gain.shape, wide(gain), 1e-6)
    if p.dtype in ("float32", "float64"): close(plan.logits, normed @ wide(router).t(), 1e-5, "logits")
    same(plan.expert, topk(plan.logits, k)[1], "ids")
    w = softmax(wide(plan.logits)).gather(1, plan.expert)
    close(plan.weight, w / w.sum(1, keepdim=True).clamp(min=1e-300) if k > 1 else w, 1e-5, "weight")
    *active, count = plan.active.tolist()
    used = sorted(set(plan.expert.flatten().tolist()))
    assert count == len(used) and active[:count] == used and set(active[count:]) <= {-1}, "active"
    for s, e in enumerate(used):
        mine = [i for i, o in enumerate(plan.expert.flatten().tolist()) if o == e]
        assert plan.table[s].tolist()[:len(mine)] == mine and set(plan.table[s].tolist()[len(mine):]) <= {-1}, "table"
    def exact(x, weight, up, down, gain, residual):
        with use("torch"): return [decode_experts(x, plan._replace(weight=weight), up, down, p.activation, gain, residual=residual)]
    tensors = [wide(t) for t in (x, plan.weight, up, down, gain, residual)]
    close(y, exact(*tensors)[0], max(LIMIT[p.dtype], 1e-6), "y", lambda: rounding(exact, p, *tensors)[0])


def check_gate(p, body):
    "Ids by a stable sort of the scores; weights, probabilities, their gradients and the losses against float64; a bad row spoils no other."
    m, kernel = Maker(p), body == "triton"                       # the kernel's rule is softmax first
    x = m.randn(p.T, p.E, scale=2.)
    if p.values == "nan" and p.T: x[p.seed % p.T, :: 1 + p.seed % 3] = (math.nan, math.inf, -math.inf)[p.seed % 3]
    k, sigmoid, first = p.k, p.bias and not kernel, kernel or p.weighted or p.k == 1 < p.E
    options = dict(score="sigmoid" if sigmoid else "softmax", score_first=first, renormalize=None if p.E == 1 or k > 1 else False, scale=1. + p.D % 2)
    gate = TopKGate(p.E, p.E, k, router=nn.Identity(), **options)
    wide = (x.double() if p.dtype == "float64" else x.float()).requires_grad_()
    mask = (torch.rand(p.T, generator=m.g) >= p.none).to(DEV)
    with use(body): r = gate(wide, mask)
    exact = wide.detach().double().requires_grad_()
    s = exact.masked_fill(~mask[:, None], 0.)                    # what padding holds, the gate never sees
    good = s.isfinite()
    order = torch.where(good, s, -math.inf).detach().argsort(dim=1, descending=True, stable=True)[:, :k]
    usable = good.gather(1, order) & mask[:, None]
    same(torch.where(usable, r.expert, -9), torch.where(usable, order, -9), "ids")
    assert r.expert[~mask].eq(-1).all() and all(len(set(row)) == k for row in r.expert[mask].tolist()), "distinct ids"
    s = torch.where(good, s, -1e300)
    scores = (s.sigmoid() if sigmoid else s.softmax(1)).masked_fill(~good, 0.)
    w = scores.gather(1, order) if first or sigmoid else s.gather(1, order).softmax(1)
    w = w.masked_fill(~usable, 0.)
    if gate.renormalize: w = w / w.sum(1, keepdim=True).clamp(min=1e-300)
    probs = scores / scores.sum(1, keepdim=True).clamp(min=1e-300) if sigmoid else scores
    close(r.weight, w * gate.scale, 1e-5, "weight")
    close(r.probs, probs, 1e-5, "probs")
    a, b = (torch.randn(t.shape, generator=m.g, dtype=torch.float64).to(DEV) for t in (w, probs))
    with use(body): got, = torch.autograd.grad((r.weight * a.to(r.weight)).sum() + (r.probs * b.to(r.probs)).sum(), wide, retain_graph=True)
    close(got, torch.autograd.grad((w * gate.scale * a).sum() + (probs * b).sum(), exact)[0], 1e-4, "gradient of logits")
    for loss in losses.values(): assert loss(r).isfinite() and loss(r) >= 0, loss.__name__
    if good.all(): assert z_loss(r).isfinite()


def check_capacity(p, body):
    "Slots by a loop over assignments in the policy's order; assignments are conserved."
    m = Maker(p)
    ids, E, k = m.expert(), p.E, p.k
    known = sorted(r for r in rules if k <= 2 or r != "fairseq")
    C = p.capacity if p.weighted else capacity(p.T, E, k, .25 * (1 + p.D % 9), rule=known[p.F % len(known)])
    by = None if p.bias else (torch.rand(p.T, generator=m.g) if p.block == 16 else torch.rand(p.T, k, generator=m.g)).mul(4).floor().to(DEV)
    choice_major = p.layout != "strided"
    d = dispatch(ids, E, C, by, choice_major)
    flat = [(t, j) for j in range(k) for t in range(p.T)] if choice_major else [(t, j) for t in range(p.T) for j in range(k)]
    if by is not None:
        token = by if by.ndim == 1 else None
        if token is not None:
            rank = sorted(range(p.T), key=lambda t, by=token.tolist(): -by[t])
            flat = [(t, j) for j in range(k) for t in rank] if choice_major else [(t, j) for t in rank for j in range(k)]
        else: flat.sort(key=lambda a, by=by.tolist(): -by[a[0]][a[1]])
    used, slot = [0] * E, [[-1] * k for _ in range(p.T)]
    chosen = ids.tolist()
    for t, j in flat:
        e = chosen[t][j]
        if e >= 0 and (C is None or used[e] < C): slot[t][j] = used[e]; used[e] += 1
    same(d.slot, torch.tensor(slot).view(p.T, k).to(d.slot), "slot"); same(d.counts, torch.tensor(used).to(d.counts), "counts")
    assert sorted(d.order.tolist()) == list(range(p.T * k)) and d.offsets.tolist() == [sum(used[:e]) for e in range(E + 1)]
    rows = d.rows()[d.kept]
    assert rows.unique().numel() == rows.numel()


def check_compress(p, body):
    "SREncode by a stable sort, SRDecode, and the optimizer's step that encodes as it goes, against float64 and the rule of its threshold."
    m, E, n, limit = Maker(p), p.E, p.F * p.D, LIMIT[p.dtype]
    draw = lambda: m.randn(E, p.F, p.D).contiguous()
    shared, w, k = m.randn(p.F, p.D), draw(), min(n, 1 + p.T)
    if p.values == "nan": w.view(-1)[p.seed % w.numel()] = math.nan
    with use(body), unwritten(p.seed % 2): r = compress.encode(w, shared, k); whole = compress.decode(r, shared)
    far = (w - shared).view(E, n)
    best = far.abs().nan_to_num(nan=math.inf).double().argsort(dim=1, descending=True, stable=True)[:, :k].sort(1)[0]
    same(r.index, best.int(), "index"); same(r.value.nan_to_num(7e4), far.gather(1, best).nan_to_num(7e4), "value")
    want = shared.double().flatten().repeat(E, 1).scatter_add_(1, best, r.value.double())
    close(whole.view(E, n), want, limit, "whole")

    g, first = m.randn(E, p.F, p.D), draw()
    second, threshold = draw().abs() + first.square(), torch.rand(E, generator=m.g).mul(3).to(DEV, torch.promote_types(m.dtype, torch.float32))
    h = compress.AdamW(.1, (.9, .99), 1e-8, .1 * p.bias, 1 + p.seed % 3)
    wide = [t.double() for t in (w, g, first, second)]
    compress._update(*wide, h)
    with use(body), unwritten(p.seed % 2): value, index, count = compress.step_and_select(w, g, first, second, shared, threshold, k, h)
    for got, want, what in zip((w, first, second), (wide[0], *wide[2:]), ("w", "m", "v")): close(got, want, limit, what)
    far = (w.double() - shared.double()).view(E, n)
    for e in range(E):
        size, t, c = far[e].abs(), threshold[e].double(), int(count[e])
        sure, maybe = (~(size <= t * (1 + limit) + limit * 1e-3)).sum(), ~(size < t * (1 - limit) - limit * 1e-3)      # NaN travels
        if c > k: assert maybe.sum() > k, "too many, said by mistake"; continue
        i = index[e, :c].long()
        assert c >= sure and maybe[i].all() and (i.diff() > 0).all() and not value[e, c:].count_nonzero() and index[e, c:].eq(n - 1).all(), "selection"
        close(value[e, :c], far[e][i], limit, "value")


def check_layer(p, body):
    "A whole `MoE` with its losses against itself in float64, as long as no token has two experts that are as good as tied."
    torch.manual_seed(p.seed)
    factor = None if p.capacity is None else (0., .5, 1., -1.25, 2.)[p.capacity % 5]
    moe = MoE(p.D, p.F, p.E, p.k, capacity_factor=factor, activation=p.activation, bias=p.bias, shared_experts=p.seed // 2 % 2).to(getattr(torch, p.dtype))
    if p.bias: [nn.init.normal_(b) for n, b in moe.named_parameters() if n.endswith("_bias")]
    m = Maker(p)
    x, mask, g = m.tokens(), None if p.none == 0 else (torch.rand(p.T, generator=m.g) >= p.none).to(DEV), torch.randn(p.T, p.D, generator=m.g, dtype=torch.float64)
    moe.to(DEV)
    names, weights = zip(*moe.named_parameters())
    def run(layer, x, body):
        x = x.detach().requires_grad_()
        with use(body), unwritten(p.seed % 2):
            y, aux = layer(x, mask)
            loss = (y * g.to(y)).sum() + aux.balance + (0. if p.values == "nan" else aux.z)
            return y, aux, torch.autograd.grad(loss, [x, *layer.parameters()], allow_unused=True)
    y, aux, grads = run(moe, x, body)
    wide = deepcopy(moe).double()
    want, truth, exact = run(wide, x.double(), "torch")
    assert y.dtype == x.dtype
    if not aux.routing.expert.equal(truth.routing.expert):
        s = truth.routing.probs.sort(1, descending=True)[0]
        off = (aux.routing.expert != truth.routing.expert).any(1)
        assert (s[:, :-1] - s[:, 1:])[off, :p.k].min(1)[0].max() < 1e-4, "ids differ, and it was no tie"
        return
    close(aux.routing.weight, truth.routing.weight, 1e-4, "weight"); close(aux.dropped, truth.dropped, 1e-6, "dropped")
    def moved(x, *weights):
        with use("torch"): return [functional_call(wide, dict(zip(names, weights)), (x, mask))[0]]
    close(y, want, LIMIT[p.dtype], "y", lambda: rounding(moved, p, x.double(), *(t.double() for t in weights))[0])
    if p.dtype in ("float32", "float64"):        # in half precision a router's gradient may be the difference of two numbers that nearly cancel
        eps = lambda b: 0. if farthest(b, 0. * b) > 1e-12 else torch.finfo(y.dtype).eps          # terms of about 1 that cancel in float64 leave a rounding
        for n, a, b in zip(["x", *names], grads, exact): close(a, b, 20 * LIMIT[p.dtype], f"gradient of {n}", lambda: eps(b))


def check_generate(p, body):
    "Token by token with a cache, in fused kernels where there are some, against the whole text at once in float64."
    torch.manual_seed(p.seed)
    heads, B, S = 1 + p.F % 2, 1 + p.T % 4, 2 + p.D % 2
    layers = 1 + p.seed % 2 * (B > 1 or DEV == "cuda")           # one token's kernels are many small programs: slow in the interpreter
    config = GPTConfig(1 + p.F, 32 * heads, layers, heads, p.D, experts=p.E if p.weighted else 0, top_k=p.E, num_kv_heads=1 + (heads - 1) * p.bias,      # all experts: no near-tie decides
                       activation=p.activation, residual=("none", "sum", "mix")[p.seed // 2 % 3])
    model = GPT(config).to(DEV, getattr(torch, p.dtype))
    ids = torch.randint(config.vocab_size, (B, S), device=DEV)
    mask = torch.ones(B, 1, dtype=torch.bool, device=DEV)
    with use(body), unwritten(p.seed % 2), torch.no_grad():
        decoder = GPTDecoder(model, B, S, graph=False)
        got = [decoder.start(ids[:, :1], mask), *(decoder.step(ids[:, i]) for i in range(1, S))]
    wide, (names, weights) = deepcopy(model).double(), zip(*model.named_parameters())
    def exact(*weights):
        with use("torch"), torch.no_grad(): return [functional_call(wide, dict(zip(names, weights)), (ids,))[0]]
    weights = [w.detach().double() for w in weights]
    close(torch.stack(got, 1), exact(*weights)[0], 4 * LIMIT[p.dtype], "logits", lambda: rounding(exact, p, *weights)[0])


CHECKS = {n.removeprefix("check_"): counted(f) for n, f in list(globals().items()) if n.startswith("check_")}
KERNELS = [n for n in CHECKS if n != "capacity"]            # these have a body in Triton
