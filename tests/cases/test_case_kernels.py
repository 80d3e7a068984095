"""K, I: offsets past 2^31 through strides, in every body that runs here; what Triton's interpreter can and cannot check."""
import ast, os, subprocess, sys

import pytest
import torch

from moe_lab.core import backend
from moe_lab.core.types import dispatch
from moe_lab.experts.blocksparse import blocksparse_mlp
from moe_lab.experts.dispatch import decode, encode
from moe_lab.experts.grouped import expert_mlp, grouped_moe

BODIES = ["torch"] + ["triton"] * (not torch.cuda.is_available())


def far(t, stride):
    "The numbers of `t` with its first dimension `stride` elements apart: addresses past 2^31, of which only the used pages exist."
    if t.shape[0] * stride > 2**33: raise ValueError("too far")
    room = torch.empty((t.shape[0] - 1) * stride + t[0].numel(), dtype=t.dtype)
    view = room.as_strided(t.shape, (stride, *t[0].contiguous().stride()))
    return view.copy_(t)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("experts, stride", [(37, 4096 * 14336), (256, 2 * 2048 * 6144 // 3)])
def test_experts_far_apart(body, experts, stride):                              # K01
    torch.manual_seed(0)
    up, down = torch.randn(experts, 16, 8).half(), torch.randn(experts, 8, 8).half()
    far_up, far_down = far(up, stride), far(down, stride)
    assert (experts - 1) * stride > 2**31 - 2**26
    x, w = torch.randn(3, 8).half(), torch.rand(3, 1)
    ids = torch.tensor([[experts - 1], [0], [experts - 2]])
    offsets = torch.zeros(experts + 1, dtype=torch.int64); offsets[experts] = 3
    with backend.use(body):
        for f in (lambda u, d: grouped_moe(x, (ids, w), u, d), lambda u, d: expert_mlp(x, offsets, u, d)):
            torch.testing.assert_close(f(far_up, far_down), f(up, down), rtol=0, atol=0)


@pytest.mark.parametrize("body", BODIES)
def test_tokens_far_apart(body):                                                # K01
    torch.manual_seed(0)
    x, stride = torch.randn(9, 8), 2**28 + 16                                   # row 8 begins behind 2^31
    up, down, ids, w = torch.randn(2, 32, 8), torch.randn(2, 8, 16), torch.arange(9)[:, None] % 2, torch.rand(9, 1)
    d, there = dispatch(ids, 2), far(x, stride)
    with backend.use(body):
        for f in (lambda x: encode(x, d), lambda x: decode(x, d, w), lambda x: grouped_moe(x, (ids, w), up, down), lambda x: blocksparse_mlp(x, d, w, up, down, block=16)):
            torch.testing.assert_close(f(there), f(x), rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter")
def test_strided_gate_weights_and_plans():                                      # K08
    torch.manual_seed(0)
    x, up, down = torch.randn(12, 8), torch.randn(3, 32, 8), torch.randn(3, 8, 16)
    ids, w = torch.rand(3, 12).argsort(0)[:2], torch.rand(2, 12)
    for body in BODIES:
        with backend.use(body):
            a, b = (grouped_moe(x, (i, v), up, down, dispatch=c) for i, v, c in ((ids.t(), w.t(), dispatch(ids.t(), 3, 5)), (ids.t().contiguous(), w.t().contiguous(), dispatch(ids.t().contiguous(), 3, 5))))
            torch.testing.assert_close(a, b, rtol=0, atol=0)


INTERPRETED = """
import sys, torch, numpy as np
import triton, triton.language as tl
from moe_lab.core import backend

@triton.jit
def product(a, b, c, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(c + i * N + j, tl.dot(tl.load(a + i * N + j), tl.load(b + i * N + j), out_dtype=tl.float32))

@triton.jit
def add(x, to, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_add(out + tl.load(to + i), tl.load(x + i))

a, b = (torch.randint(-4, 5, (16, 16)).float() for _ in range(2))
for dtype, right in ((torch.float32, True), (torch.float16, True), (torch.bfloat16, False)):
    c = torch.empty(16, 16)
    product[(1,)](a.to(dtype), b.to(dtype), c, 16)
    assert torch.equal(c, a @ b) == right, dtype
    assert backend.triton_body(a.to(dtype)) == right
to = torch.tensor([0, 1] * 4)
for dtype in (torch.float32, torch.float16, torch.int32):
    out = torch.zeros(2, dtype=dtype)
    add[(1,)](torch.ones(8, dtype=dtype), to, out, 8)
    assert out.tolist() == [4, 4], dtype
try: add[(1,)](torch.ones(8, dtype=torch.bfloat16), to, torch.zeros(2, dtype=torch.bfloat16), 8)
except Exception: pass
else: raise SystemExit("bf16 atomics work now: our kernels no longer need to avoid them")
assert backend.interpreting() and backend.current() == "triton"
"""


def test_what_the_interpreter_gets_wrong_stays_out():                           # I01, I03, I04
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "MOE_LAB_BACKEND": "triton", "PYTHONPATH": os.pathsep.join(sys.path)}
    import tempfile, textwrap
    with tempfile.NamedTemporaryFile("w", suffix=".py") as f:                   # jitted functions need a source file
        f.write(INTERPRETED); f.flush()
        done = subprocess.run([sys.executable, f.name], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_kernel_adds_atomically_in_half_precision():                         # I03
    "Kernels count atomically, by whole numbers written in the call; they never add up data so, in no precision."
    from tally import ROOT
    calls = [(p.name, c) for p in (ROOT / "moe_lab").rglob("*.py") for c in ast.walk(ast.parse(p.read_text()))
             if isinstance(c, ast.Call) and isinstance(c.func, ast.Attribute) and c.func.attr.startswith("atomic_")]
    adds = [(name, c) for name, c in calls if c.func.attr == "atomic_add"]
    assert adds and {c.func.attr for _, c in calls} <= {"atomic_add", "atomic_xchg"}                 # an exchange stores, it adds nothing
    for name, c in adds: assert isinstance(c.args[1], ast.Constant) and type(c.args[1].value) is int, (name, ast.unparse(c))
