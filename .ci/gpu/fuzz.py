"""Fuzz every operator on a GPU against float64, check that the same seed gives the same bits, and offsets past 2^31.

    python3 .ci/gpu/fuzz.py [seconds a group, default 22 [groups]]     from the repository root; needs hypothesis; all groups at once; writes $OUT/fuzz.json
    python3 .ci/gpu/fuzz.py 150 products,step,bits                     these only, with more processes each
"""
import hashlib, json, os, random, subprocess, sys, tempfile, time
from dataclasses import replace

ROOT = os.getcwd()
sys.path[:0] = [ROOT, f"{ROOT}/tests"]
from strategies import ACTIVATIONS, CHECKS, LAYOUTS, ROUTES, VALUES, Problem
import torch, triton
from moe_lab.experts.decode import MAX_TOKENS

OUT = os.environ.get("OUT", ".")
report = {}
def save():
    with open(f"{OUT}/fuzz.json", "w") as f: json.dump(report, f, indent=1)
def say(*a): print(f"[{time.perf_counter() - t0:6.1f} s]", *a, flush=True)
t0 = time.perf_counter()


def sample(rnd, fixed):
    "What does not choose a kernel is drawn anew each time; what does is drawn once a variant (a compilation takes a second)."
    T = rnd.choice([0, 1, 2, 7, 30, 100, 257, 600, 1500])
    return replace(fixed, T=T, route=rnd.choice(ROUTES), none=rnd.choice([0., .3]), capacity=rnd.choice([None, None, 0, 1, T // 4, T]), values=rnd.choice(VALUES), seed=rnd.randrange(2**16))

def variant(rnd):
    E = rnd.choice([1, 2, 5, 8, 64])
    return Problem(0, rnd.choice([1, 8, 40, 65, 128, 200, 768]), rnd.choice([1, 24, 64, 100, 256, 768]), E, rnd.randint(1, min(E, 4)), activation=rnd.choice(sorted(ACTIVATIONS)),
                   bias=rnd.random() < .5, weighted=rnd.random() < .7, layout=rnd.choice(LAYOUTS), dtype=rnd.choice(["bfloat16", "float16", "float32"]), block=rnd.choice([64, 128, 256]))

def attempt(name, p):
    "(numbers compared, error)"
    try: return CHECKS[name](p, "triton"), None
    except Exception as e: return 0, f"{type(e).__name__}: {str(e)[:300]}"

def fails(name, p): return attempt(name, p)[1]

def shrunk(name, p, seconds=6.):
    "The simplest problem near `p` that fails the same way."
    end, simple = time.perf_counter() + seconds, dict(T=[0, 1, 2, 7], values=["normal"], layout=["packed"], route=["even"], none=[0.], capacity=[None, 0, 1], bias=[False], weighted=[False, True], D=[1, 8], F=[1, 8], E=[1, 2], k=[1], activation=["gelu"], dtype=["float32"])
    kind = fails(name, p).split(":")[0]
    for field, values in simple.items():
        for v in values:
            if time.perf_counter() > end: return p
            if getattr(p, field) == v: break
            try: q = replace(p, **{field: v})
            except Exception: continue
            if q.k > q.E: continue
            if (e := fails(name, q)) and e.startswith(kind): p = q; break
    return p

def fuzz(name, seconds, stream=0):
    rnd, end, done, bad, variants = random.Random(f"{name} {stream}"), time.perf_counter() + seconds, 0, [], 0
    while time.perf_counter() < end and done < 3000:
        fixed, variants = variant(rnd), variants + 1
        for _ in range(80):
            p = sample(rnd, fixed)
            if name == "compress": p = replace(p, E=min(p.E, 5), k=1)
            if name == "step": p = replace(p, T=p.T % (MAX_TOKENS + 1))
            numbers, e = attempt(name, p)
            if e:
                small = shrunk(name, p)
                bad.append(dict(problem=repr(small), error=fails(name, small) or e, first=repr(p)))
                say("FAIL", name, bad[-1]["problem"], bad[-1]["error"])
                if "CUDA" in e or len(bad) >= 6: end = 0.
                break
            done += numbers > 0
            if time.perf_counter() > end: break
    return dict(examples=done, variants=variants, failures=bad)


def bits():
    "Digests of what 20 runs of each operator and of a small training give."
    from moe_lab import MoE
    from moe_lab.core.types import dispatch
    from moe_lab.experts.blocksparse import blocksparse_mlp
    from moe_lab.experts.grouped import grouped_moe
    def digest(ts): return hashlib.sha256(b"".join(t.detach().float().cpu().numpy().tobytes() for t in ts)).hexdigest()[:16]
    out = {}
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        T, D, F, E, k = 3000, 256, 512, 8, 2
        ids = torch.rand(T, E).argsort(1)[:, :k].cuda()
        x, up, down = (torch.randn(*s).cuda().to(dtype) * c for s, c in (((T, D), 1), ((E, 2 * F, D), D**-.5), ((E, D, F), F**-.5)))
        w = torch.rand(T, k).cuda()
        args, d = [t.requires_grad_() for t in (x, w, up, down)], dispatch(ids, E)
        for name, f in (("grouped", lambda x, w, up, down: grouped_moe(x, (ids, w), up, down)), ("blocksparse", lambda x, w, up, down: blocksparse_mlp(x, d, w, up, down))):
            seen = set()
            for _ in range(20):
                y = f(*args)
                seen.add(digest([y, *torch.autograd.grad(y.float().square().sum(), args)]))
            out[f"{name} {dtype}"] = sorted(seen)
        for factor in (None, 1.):
            seen = set()
            for _ in range(20):
                torch.manual_seed(0)
                moe = MoE(D, F, E, k, capacity_factor=factor).cuda().to(dtype)
                opt = torch.optim.AdamW(moe.parameters(), lr=1e-2)
                for _ in range(3):
                    y, aux = moe(x.detach()); opt.zero_grad(); (y.float().square().mean() + aux.balance).backward(); opt.step()
                seen.add(digest([y, *moe.parameters()]))
            out[f"training, capacity factor {factor}, {dtype}"] = sorted(seen)
    return out


def large():
    "More than 2^31 elements in rows, and experts whose weights lie past 2^31."
    from moe_lab.core.types import dispatch
    from moe_lab.experts.dispatch import decode, encode
    from moe_lab.experts.grouped import grouped_moe
    T, D = 131072 + 64, 16384 + 8
    ids = (torch.arange(T, device="cuda") % 2)[:, None]
    d, x = dispatch(ids, 2), torch.randn(T, D, device="cuda", dtype=torch.bfloat16)
    z = encode(x, d); y = decode(z, d)
    assert torch.equal(y[-64:], x[-64:]) and torch.equal(z[-1], x[-1])
    del x, y, z
    E, D, F = 257, 2048, 2048
    up, down = (torch.randn(E, a, b, device="cuda", dtype=torch.bfloat16) * .02 for a, b in ((2 * F, D), (D, F)))
    x, ids, w = torch.randn(5, D, device="cuda", dtype=torch.bfloat16), torch.tensor([[256], [255], [0], [256], [128]], device="cuda"), torch.ones(5, 1, device="cuda")
    y = grouped_moe(x, (ids, w), up, down)
    for t, e in enumerate(ids.flatten().tolist()):
        g, u = (up[e].double() @ x[t].double()).chunk(2)
        want = down[e].double() @ (torch.nn.functional.silu(g) * u)
        assert (y[t].double() - want).norm() < .03 * want.norm(), (t, e)
    return "ok"


def parts(groups):
    "Name of a process -> what it does. A machine with a GPU has 16 cores, and compiling is most of the work."
    fuzzed = [n for n in groups if n in CHECKS]
    streams = max(2, 15 // max(1, len(fuzzed)))
    out = {f"{name} {i}": lambda seconds, name=name, i=i: fuzz(name, seconds, i) for name in fuzzed for i in range(1 if name in ("gate", "capacity") else streams)}
    return out | (dict(large=lambda _: large()) if "large" in groups else {}) | (dict(bits=lambda _: bits(), bits_again=lambda _: bits()) if "bits" in groups else {})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        with open(sys.argv[4], "w") as f: json.dump(parts([sys.argv[2].split()[0].removesuffix("_again")])[sys.argv[2]](float(sys.argv[3])), f)
        sys.exit()
    seconds, groups, folder = float(sys.argv[1]) if sys.argv[1:] else 22., sys.argv[2].split(",") if sys.argv[2:] else [*CHECKS, "large", "bits"], tempfile.mkdtemp()
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "seconds": seconds}
    running = {n: subprocess.Popen([sys.executable, __file__, "--part", n, str(seconds), f"{folder}/{n}"]) for n in parts(groups)}
    for n, p in running.items():
        try: code = p.wait(max(1., seconds + 90 - time.perf_counter() + t0))
        except subprocess.TimeoutExpired: p.kill(); code = "not finished"
        try:
            with open(f"{folder}/{n}") as f: report[n] = json.load(f)
        except (OSError, ValueError): report[n] = f"ended with {code}"
        save()
    for name in set(groups) & CHECKS.keys():
        done = [report.pop(n) for n in running if n.split()[0] == name]
        good = [p for p in done if isinstance(p, dict)]
        report[name] = dict(examples=sum(p["examples"] for p in good), variants=sum(p["variants"] for p in good), failures=[f for p in good for f in p["failures"]] + [p for p in done if isinstance(p, str)])
    if "bits" in groups:
        a, b = report.pop("bits"), report.pop("bits_again")
        report["determinism"] = {n: dict(same_20=len(a[n]) == len(b[n]) == 1, same_processes=a[n] == b[n]) for n in a} if isinstance(a, dict) and isinstance(b, dict) else [a, b]
    save()
    for n, r in report.items(): say(n, r if n not in CHECKS else f"{r['examples']} examples, {r['variants']} variants, {len(r['failures'])} failures")
    say("end")
