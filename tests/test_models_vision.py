"""models.vision: windows are windows, experts take patches."""
import pytest
import torch
from hypothesis import given, settings, strategies as st

from moe_lab.models.vision import Swin, SwinConfig, WindowAttention, from_windows, neighbours, to_windows


@settings(max_examples=30, deadline=None)
@given(B=st.integers(0, 3), n=st.integers(1, 3), m=st.integers(1, 3), w=st.integers(1, 4))
def test_windows_come_back(B, n, m, w):
    x = torch.randn(B, n * w, m * w, 2)
    assert torch.equal(from_windows(to_windows(x, w), w, n * w, m * w), x)


@pytest.mark.parametrize("size,w,shift", [(8, 4, 2), (12, 4, 2), (4, 4, 0), (8, 2, 1)])
def test_mask_is_what_a_walk_over_patches_says(size, w, shift):
    "Two patches may see each other when neither was rolled around an edge that the other was not."
    mask = neighbours(size, w, shift)
    where = to_windows(torch.arange(size * size).view(1, size, size, 1).roll((-shift, -shift), (1, 2)), w)[..., 0]
    for window in range(len(where)):
        for i, a in enumerate(where[window].tolist()):
            for j, b in enumerate(where[window].tolist()):
                (ya, xa), (yb, xb) = divmod(a, size), divmod(b, size)
                near = abs(ya - yb) < w and abs(xa - xb) < w
                assert mask[window, i, j].item() == near


def test_attention_equals_a_loop_over_windows():
    torch.manual_seed(0)
    att, x = WindowAttention(8, 2, 8, 4, 0).double(), torch.randn(2, 8, 8, 8, dtype=torch.float64)
    torch.nn.init.normal_(att.bias)
    y = att(x)
    for b in range(2):
        for i in range(2):
            for j in range(2):
                z = x[b, 4 * i:4 * i + 4, 4 * j:4 * j + 4].reshape(16, 8)
                q, k, v = att.qkv(z).view(16, 3, 2, 4).unbind(1)
                out = torch.empty(16, 2, 4, dtype=torch.float64)
                for h in range(2):
                    s = q[:, h] @ k[:, h].t() / 2
                    for p in range(16):
                        for r in range(16): s[p, r] += att.bias[h, (p // 4 - r // 4 + 3) * 7 + p % 4 - r % 4 + 3]
                    out[:, h] = s.softmax(-1) @ v[:, h]
                want = att.out(out.reshape(16, 8))
                torch.testing.assert_close(y[b, 4 * i:4 * i + 4, 4 * j:4 * j + 4].reshape(16, 8), want)


def test_every_parameter_gets_a_gradient_and_an_empty_batch_works():
    torch.manual_seed(0)
    model = Swin(SwinConfig(experts=4, capacity_factor=None))
    logits, aux = model(torch.rand(6, 8, 8))
    (logits.square().sum() + sum(a.balance for a in aux if a is not None)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model(torch.rand(0, 8, 8))[0].shape == (0, 10)
