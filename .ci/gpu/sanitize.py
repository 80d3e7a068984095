"""Every kernel of one device at odd sizes, empty experts, tails of tiles and no token, under compute-sanitizer.

    python .ci/gpu/sanitize.py [seconds a tool [tools [groups]]]     plain, then under racecheck, and so for memcheck; writes sanitize.json, sanitize.txt (all that was said) and summary.txt to $OUT
    python .ci/gpu/sanitize.py --group NAME I/N SECONDS SIZE         every N-th case of a group in this process; none begins after SECONDS. Without a GPU: in Triton's interpreter

Racecheck is slow: its cases are small, and it leaves PyTorch's own kernels alone. `control` holds a race and a read past an end: a tool that does not find them saw nothing.
"""
import glob, json, os, re, shutil, signal, subprocess, sys, tempfile, time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] if (Path(__file__).resolve().parents[2] / "moe_lab").exists() else Path.cwd()
sys.path.insert(0, str(ROOT))
OUT = Path(os.environ.get("OUT", "."))
#: Processes a group: a tool's work is divided, and a GPU's machine has 16 cores.
PARTS = dict(control=1, steps=3, products=1, blocksparse=3, grouped_hopper=3, grouped_plain=2, routing=2, compress=1)
bad = []

# --- cases ----------------------------------------------------------------------------------------------------------

def tensors():
    "Imports, a seed, and memory that nobody wrote full of NaN."
    global torch, DEV, BF, HALF, SINGLE
    import torch
    DEV = "cuda" if torch.cuda.is_available() else "cpu"
    if DEV == "cpu": os.environ |= dict(TRITON_INTERPRET="1", MOE_LAB_BACKEND="triton")
    BF, HALF, SINGLE = torch.bfloat16 if DEV == "cuda" else torch.float16, torch.float16, torch.float32      # the interpreter is wrong in bfloat16
    torch.use_deterministic_algorithms(True, warn_only=True)      # torch.empty is then filled with NaN
    torch.manual_seed(0)

@contextmanager
def case(name):
    "Says how a case ends; one that fails does not end the others. None begins when the time is over: the tool sums up what it saw."
    if time.monotonic() > end: print(f"cases: {len(bad)} wrong, stopped before {name}: " + " | ".join(bad), flush=True); sys.exit()
    said = len(bad)
    try:
        yield lambda **outputs: bad.extend(f"{name}: {n} has {int((~t.isfinite()).sum())} of {t.numel()} not finite, {int(t.isnan().sum())} of them NaN" for n, t in outputs.items() if not t.isfinite().all())
        if DEV == "cuda": torch.cuda.synchronize()
    except Exception as e: bad.append(f"{name}: {type(e).__name__}: {str(e)[:300]}")
    print(*(bad[said:] or [f"{name}: finite"]), sep="\n", flush=True)

def mine(cases): return list(cases)[part::parts]

def rand(*shape, dtype, scale=1.): return (torch.randn(shape, device=DEV) * scale).to(dtype).requires_grad_()

def named(prefix, y, loss, **leaves): return {"y": y} | {f"{prefix} {n}": g for n, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values())))}

def grouped(hopper):
    from moe_lab.experts import grouped_kernels
    from moe_lab.experts.grouped import expert_mlp, grouped_moe
    grouped_kernels.HOPPER.clear(); grouped_kernels.HOPPER.update(hopper)
    less = size == "small"
    for T, D, F, E, k, act, dtype, bias in mine([(150 if less else 700, 128, 192, 4, 2, "swiglu", BF, False), (130 if less else 300, 96, 80, 4, 2, "geglu", BF, True),
                                                 (40 if less else 90, 33, 20, 3, 3, "gelu", HALF, True), (20 if less else 60, 40, 24, 20 if less else 130, 2, "relu2", SINGLE, True),
                                                 (150, 192, 192, 3, 1, "swiglu", HALF, False) if less else (700, 768, 768, 3, 1, "swiglu", HALF, False), (0, 64, 64, 4, 2, "swiglu", BF, False)]):
        h = 2 if act in ("swiglu", "geglu") else 1
        leaves = dict(x=rand(T, D, dtype=dtype), weight=rand(T, k, dtype=SINGLE), up=rand(E, h * F, D, dtype=dtype, scale=D**-.5), down=rand(E, D, F, dtype=dtype, scale=F**-.5))
        if bias: leaves |= dict(up_bias=rand(E, h * F, dtype=dtype), down_bias=rand(E, D, dtype=dtype))
        x, w, up, down, *b = leaves.values()
        ids = torch.rand(T, E, device=DEV).topk(k, -1)[1]
        if T: ids[ids == 1] = -1                             # expert 1 stays empty
        name = f"T{T} D{D} F{F} E{E} {act} {dtype}"
        with case(f"layer {name}") as finite:
            y = grouped_moe(x, (ids, w), up, down, act, *b)
            finite(**named("gradient of", y, y.float().square().mean() if T else y.sum(), **leaves))
        with case(f"layer, inference {name}") as finite, torch.no_grad(): finite(y=grouped_moe(x, (ids, w), up, down, act, *b))
        with case(f"layer, main gradients {name}") as finite:
            main = tuple(torch.zeros(t.shape, device=DEV) for t in (up, down))
            grouped_moe(x, (ids, w), up, down, act, *b, main_grads=main).float().sum().backward()
            finite(up=main[0], down=main[1])
        with case(f"rows {name}") as finite:
            offsets = torch.linspace(0, max(T - 3, 0), E + 1, device=DEV).long()
            y = expert_mlp(x, offsets, up, down, act, *b)
            del leaves["weight"]
            finite(**named("gradient of", y, y.float().sum(), **leaves))

def routing():
    from moe_lab.core.types import dispatch
    from moe_lab.experts.dispatch import decode, encode
    from moe_lab.experts.grouped import expert_plan
    from moe_lab.routing.gate import softmax_topk
    for T, E, k in mine(((33, 13, 3), (70, 130, 17), (5, 1, 1), (0, 8, 2))):
        logits = rand(T, E, dtype=SINGLE)
        with case(f"gate T{T} E{E} k{k}") as finite:
            p, ids, w = softmax_topk(logits, k, True)
            finite(probs=p, weight=w, **named("gradient of", w, (p * p).sum() + (w * w).sum(), logits=logits))
        with case(f"plan T{T} E{E} k{k}"):
            for tile in (16, 128): expert_plan(ids, E, tile)
        for capacity in (4, None):
            with case(f"encode, decode T{T} E{E} capacity {capacity}") as finite:
                d, x, s = dispatch(ids, E, capacity), rand(T, 40, dtype=BF), rand(T, k, dtype=SINGLE)
                y = decode(encode(x, d), d, s)
                finite(**named("gradient of", y, y.float().sum(), x=x, weight=s))
    if part == 0:
        with case("plan of 1000 experts"): expert_plan(torch.randint(-1, 1000, (3000 if size == "full" else 300, 8), device=DEV), 1000, 128)

def blocksparse():
    from moe_lab.core.types import dispatch
    from moe_lab.experts.blocksparse import blocksparse_mlp
    e = torch.repeat_interleave(torch.arange(4), torch.tensor([140, 0, 20, 1] if size == "small" else [300, 0, 129, 1]))
    e = e[torch.randperm(len(e))][:, None]
    for block, dtype, D, F in mine(((128, BF, 136, 256), (64, BF, 72, 64), (256, HALF, 256, 256), (128, SINGLE, 40, 128), (128, BF, 65, 96))):
        d = dispatch(e.to(DEV), 4)
        leaves = dict(x=rand(len(e), D, dtype=dtype), weight=rand(len(e), 1, dtype=dtype), up=rand(4, 2 * F, D, dtype=dtype, scale=D**-.5), down=rand(4, D, F, dtype=dtype, scale=F**-.5))
        for loss in ("mean", "sum") if size == "full" else ("mean",):
            for sync in (True, False):
                with case(f"block {block} D{D} F{F} {dtype} sync {sync} {loss}") as finite:
                    x, *rest = leaves.values()
                    y = blocksparse_mlp(x, d, *rest, block=block, sync=sync)
                    finite(**named("gradient of", y, getattr(y.float().square(), loss)(), **leaves))

def products():
    from moe_lab.experts import products as P, products_kernels as T
    from moe_lab.experts.topology import topology_from_mask
    topo = topology_from_mask(torch.rand(5, 7, device=DEV) < .5, 128)
    x, w = (rand(*s, dtype=BF).detach() for s in ((640, 72), (72, 896)))
    s = P.sdd(x, w, topo)
    for name, f in dict(sdd=lambda: s.data, dsd=lambda: P.dsd(s, w.t()), dsd_t=lambda: P.dsd(s.T, x), dds=lambda: P.dds(x.t(), s), dds_t=lambda: P.dds(w, s.T)).items():
        with case(name) as finite: finite(y=f())
    t = T.default_tiles("dsd", x.dtype, 128, 72)
    with case("plain sdd") as finite: finite(y=T.sdd(x, w[None], topo.indices, 128, 0, T.default_tiles("sdd", x.dtype, 128, 128)))
    for tr, b in ((False, w.t()), (True, x)):
        for stack in (0, 1):
            with case(f"plain dsd, transposed {tr}, stack {stack}") as finite: finite(y=T.dsd(s.data, b[None], topo.indices, 0, tr, stack, t))

def steps():
    from moe_lab.experts.decode import decode_experts, decode_gate
    from moe_lab.inference.step import FusedStep, fits
    from moe_lab.models.gpt import GPT, GPTConfig, KVCache
    for T, D, F, E, k, act, dtype in mine(((1, 7, 5, 1, 1, "relu2", SINGLE), (1, 40, 33, 130, 8, "swiglu", HALF), (33, 24, 17, 6, 2, "swiglu_oai", BF), (16, 256, 300, 64, 4, "geglu", BF))):
        with case(f"decode T{T} D{D} F{F} E{E} k{k} {dtype}") as finite, torch.no_grad():
            x, h = rand(T, D, dtype=dtype), 1 if act == "relu2" else 2
            plan = decode_gate(x, rand(E, D, dtype=dtype, scale=D**-.5), k)
            finite(weight=plan.weight, y=decode_experts(x, plan, rand(E, h * F, D, dtype=dtype, scale=D**-.5), rand(E, D, F, dtype=dtype, scale=F**-.5), act))
    for B, heads, kv in mine(((5, 4, 2), (1, 4, 4))):
        with case(f"six kernels a layer, batch {B}, {heads} heads, {kv} of keys") as finite, torch.no_grad():
            model = GPT(GPTConfig(101, 128, 2, heads, 80, experts=(0, 5), top_k=2, num_kv_heads=kv)).to(DEV, BF)
            assert fits(model, B)
            step = FusedStep(model, KVCache(model.config, B, 70, DEV, BF))
            for _ in range(66 if size == "full" else 3): y = step(torch.randint(101, (B,), device=DEV))
            finite(logits=y)

def compress():
    from moe_lab.hybrid_ep.compress import AdamW, decode, encode, step_and_select
    for E, n, k in mine(((3, 1000, 37), (1, 1, 1), (2, 5000, 5000), (2, 33, 0))):
        with case(f"compress E{E} n{n} k{k}") as finite, torch.no_grad():
            w, g, m, v = (rand(E, n, dtype=SINGLE).detach().abs() for _ in range(4))
            finite(whole=decode(encode(w, w[0], k), w[0]))
            if k: value, _, _ = step_and_select(w, g, m, v, w[0].clone(), torch.full((E,), 1., device=DEV), k, AdamW(1e-3, (.9, .99), 1e-8, .1, 1)); finite(w=w, m=m, v=v, value=value)

def control():
    "Warps that read what others write without waiting, and a read past an end."
    source = """extern "C" __global__ void wrong(float* x, int n) {
        __shared__ float s[256];
        s[threadIdx.x] = x[threadIdx.x + n];
        x[threadIdx.x] = s[(threadIdx.x + 64) % 256]; }"""
    wrong, memcheck = torch.cuda._compile_kernel(source, "wrong"), os.environ.get("TOOL") == "memcheck"
    for name, n in {"one past the end": 1000 - 255, "a gigabyte past the end": 1 << 28}.items() if memcheck else [("a race", 0)]:
        with case(name): wrong((1, 1, 1), (256, 1, 1), (torch.zeros(1000, device=DEV), n))

GROUPS = dict(control=control, grouped_plain=lambda: grouped({}), grouped_hopper=lambda: grouped(dict(up=0, dh=0, down=0, dx=0, dw=0)), routing=routing, blocksparse=blocksparse, products=products, steps=steps, compress=compress)

# --- the tool -------------------------------------------------------------------------------------------------------

def find_tool():
    "compute-sanitizer on the path, of a toolkit, or out of NVIDIA's wheel."
    if found := shutil.which("compute-sanitizer"): return found
    places = ["/usr/local/cuda*/bin", "/usr/local/cuda*/compute-sanitizer", *(f"{p}/nvidia/**" for p in sys.path if p)]
    return next((f for p in places for f in sorted(glob.glob(f"{p}/compute-sanitizer", recursive=True), reverse=True) if os.path.isfile(f) and os.access(f, os.X_OK)), None)

HAZARD = r"(\w+ hazard) detected at __shared__ (0x\w+) in block.*\n=+ +(?:Write|Read) Thread \S+ at (\S+?)\+0x\w+(?: in (\S+))?\n=+ +(?:Write|Read) Thread \S+ at (\S+?)\+0x\w+(?: in (\S+))?"

def findings(text):
    "What the tool said; of races only how many there are between which two lines, and over how many bytes."
    races = {}
    for kind, byte, a, line, b, other in re.findall(HAZARD, text): races.setdefault((kind, a, line, b, other), []).append(byte)
    return ([f"{len(at)} x {kind}, {a} {line} and {b} {other}, {len(set(at))} bytes" for (kind, a, line, b, other), at in races.items()]
            or re.findall(r"========= (?:Invalid|Error|Warning|Race|Program hit).*", text)[:20])

def run_all(how, command, seconds, report, size, groups):
    "All groups at once, in all their parts, each a process; what one says goes to sanitize.txt, the summary of a group to the report."
    start, running = time.monotonic(), {}
    env = os.environ | {"PYTHONUNBUFFERED": "1", "TOOL": how} | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if command else {})      # a tensor is an allocation: one past its end is seen
    for g in groups:
        for i in range(PARTS[g]):
            out = tempfile.TemporaryFile("w+", errors="replace")
            running[g, i] = subprocess.Popen([*command, sys.executable, __file__, "--group", g, f"{i}/{PARTS[g]}", str(seconds * .7), size], stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True), out
    rows = report[how] = {}
    for (g, i), (p, out) in running.items():
        try: code = p.wait(max(.1, seconds - (time.monotonic() - start)))
        except subprocess.TimeoutExpired: os.killpg(p.pid, signal.SIGKILL); p.wait(); code = None
        out.seek(0)
        text = out.read()
        with open(OUT / "sanitize.txt", "a") as log: log.write(f"##### {how} {g} {i}\n{text[:200_000]}\n")
        r = rows.setdefault(g, dict(ended=[], summary=[], finite=0, cases=[], findings=[]))
        r["ended"].append(code)
        r["summary"] += (re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text) or ["no summary"] * bool(command))[-1:]
        r["finite"] += len(re.findall(": finite$", text, re.M))
        r["cases"] += re.findall(r"^cases: (.*)$", text, re.M)[-1:] or ["did not come to the end"]
        r["findings"] += findings(text)
        print(f"[{time.monotonic() - start:5.1f} s] {how} {g} {i}: {code} {r['summary'][-1:]} {r['cases'][-1]}", flush=True)
        said = {g: r | {n: "; ".join(sorted(set(r[n]))) or None for n in ("summary", "cases")} for g, r in rows.items()}
        (OUT / "sanitize.json").write_text(json.dumps(report | {how: said}, indent=1))
    report[how] = said

def main(seconds=100., tools="racecheck,memcheck", groups=",".join(PARTS)):
    import torch
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    tool, groups, tools = find_tool(), groups.split(","), tools.split(",")
    report = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, triton=__import__("triton").__version__, tool=tool,
                  version=subprocess.run([tool, "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1:] if tool else "compute-sanitizer is not installed")
    print(report, flush=True)
    options = dict(racecheck=["--racecheck-report", "all", "--show-backtrace", "no", "--print-limit", "100000", *(o for name in ("_Z", "nvjet", "gemm") for o in ("--kernel-name-exclude", f"kns={name}"))], memcheck=["--print-limit", "20"])
    try:
        for t in tools if tool else ():
            size = "small" if t == "racecheck" else "full"
            run_all(f"plain, {size}", [], float(seconds), report, size, groups)                 # kernels are compiled here, not under the tool
            run_all(t, [tool, "--tool", t, *options[t]], float(seconds), report, size, groups)
    finally:
        lines = [f"{how} {g}: {r['summary'] or ''} {r['cases']}" for how, rows in report.items() if isinstance(rows, dict) for g, r in rows.items()]
        (OUT / "summary.txt").write_text("\n".join([str(report["version"]), *lines]) + "\n")
        print(*lines, "end", sep="\n", flush=True)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--group"]:
        part, parts = map(int, sys.argv[3].split("/"))
        seconds, size = float(sys.argv[4]), sys.argv[5]
        end = time.monotonic() + seconds
        signal.alarm(int(seconds / .7 * .93))                        # ends a case that does not end, so that the tool still sums up what it saw
        tensors()
        GROUPS[sys.argv[2]]()
        print(f"cases: all finite" if not bad else f"cases: {len(bad)} wrong: " + " | ".join(bad), flush=True)
    else: main(*sys.argv[1:])
