"""models.gpt against outside models with the same weights, and at its limits."""
import pytest
import torch
from hypothesis import given, settings, strategies as st

from moe_lab.integrations.hf import moe_state_dict
from moe_lab.models.gpt import GPT, GPTConfig, KVCache, every, num_params

TINY = dict(vocab_size=50, d_model=16, num_layers=2, num_heads=4, d_hidden=24)


def built(seed=0, **kw):
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{**TINY, **kw})).double().eval()


def copy_from_peer(ours, theirs):
    "A Llama or Mixtral of `transformers` into our names."
    get = dict(theirs.named_parameters())
    put = {"embed.weight": get["model.embed_tokens.weight"], "norm.weight": get["model.norm.weight"]}
    for l in range(ours.config.num_layers):
        a, b = f"blocks.{l}.", f"model.layers.{l}."
        put[a + "attention.qkv.weight"] = torch.cat([get[f"{b}self_attn.{o}_proj.weight"] for o in "qkv"])
        put[a + "attention.out.weight"] = get[b + "self_attn.o_proj.weight"]
        put[a + "norm1.weight"], put[a + "norm2.weight"] = get[b + "input_layernorm.weight"], get[b + "post_attention_layernorm.weight"]
        if b + "mlp.gate.weight" in get:
            put |= {f"{a}ffn.{n}": t for n, t in moe_state_dict(theirs.model.layers[l].mlp.state_dict()).items()}
        else:
            put[a + "ffn.up"] = torch.cat([get[f"{b}mlp.{o}_proj.weight"] for o in ("gate", "up")])[None]
            put[a + "ffn.down"] = get[b + "mlp.down_proj.weight"][None]
    ours.load_state_dict({n: t.detach().double() for n, t in put.items()})


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_equals_transformers_with_the_same_weights(kind):
    tf = pytest.importorskip("transformers")
    sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 tie_word_embeddings=True, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 10_000.})
    torch.manual_seed(0)
    theirs = (tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)) if kind == "llama" else
              tf.MixtralForCausalLM(tf.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))).eval()
    for p in theirs.parameters():
        if p.ndim > 1: torch.nn.init.normal_(p, std=0.3)      # far from uniform, or a wrong order would not show
    ours = built(num_kv_heads=2, experts=4 if kind == "mixtral" else 0, top_k=2 if kind == "mixtral" else 1)
    copy_from_peer(ours, theirs)
    ids = torch.randint(50, (2, 11))
    want, got = theirs(ids).logits, ours(ids)[0]
    torch.testing.assert_close(got.float(), want, rtol=1e-3, atol=1e-3)   # theirs run in float32
    assert want.std() > 1


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), experts=st.sampled_from([0, 4, (0, 3)]), residual=st.sampled_from(["none", "sum", "mix"]), cut=st.integers(1, 6))
def test_no_token_sees_the_future(seed, experts, residual, cut):
    model = built(seed, experts=experts, residual=residual)
    ids = torch.randint(50, (2, 7), generator=torch.Generator().manual_seed(seed))
    other = ids.clone()
    other[:, cut:] = (ids[:, cut:] + 1) % 50
    torch.testing.assert_close(model(other)[0][:, :cut], model(ids)[0][:, :cut])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), kv=st.sampled_from([1, 2, 4]))
def test_any_way_of_reading_gives_the_same_logits(seed, sizes, kv):
    model = built(seed, experts=3, top_k=2, num_kv_heads=kv)
    ids = torch.randint(50, (2, sum(sizes)), generator=torch.Generator().manual_seed(seed))
    cache = KVCache(model.config, 2, sum(sizes), dtype=torch.float64)
    parts = torch.cat([model(p, cache=cache)[0] for p in ids.split(sizes, 1)], 1)
    torch.testing.assert_close(parts, model(ids)[0])


@pytest.mark.parametrize("experts,residual", [(0, "none"), (4, "none"), ((4, 0), "sum"), (4, "mix")])
def test_every_parameter_gets_a_gradient(experts, residual):
    model = built(experts=experts, residual=residual)
    logits, aux = model(torch.randint(50, (4, 16)))
    (logits.square().mean() + sum(a.balance for a in aux if a is not None)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all(), name
        if "experts" not in name: assert p.grad.abs().sum() > 0, name


def test_empty_batch_and_one_token():          # Z07
    model = built(experts=4)
    logits, aux = model(torch.zeros(0, 5, dtype=torch.int64))
    assert logits.shape == (0, 5, 50) and aux[0].counts.sum() == 0
    (logits.sum() + sum(a.balance for a in aux)).backward()
    assert all(float(p.grad.abs().sum()) == 0 for p in model.parameters())
    assert model(torch.zeros(1, 1, dtype=torch.int64))[0].shape == (1, 1, 50)


def test_another_moe_in_the_same_place():
    calls = []
    class Fake(torch.nn.Module):
        def forward(self, x, mask=None): calls.append(x.shape); return torch.zeros_like(x), None
    model = GPT(GPTConfig(**TINY, experts=every(2, 2, 4)), moe=lambda config, layer: Fake())
    model(torch.zeros(2, 3, dtype=torch.int64))
    assert calls == [(2, 3, 16)]


@pytest.mark.parametrize("bad,word", [(dict(experts=-1), "experts"), (dict(experts=2, top_k=3), "top_k"), (dict(num_heads=3), "d_model"), (dict(num_kv_heads=3), "num_kv_heads=3"),
                                      (dict(d_model=0), "d_model"), (dict(residual="max"), "residual"), (dict(experts=(1, 2, 3)), "2 layers"), (dict(activation="tanh"), "activation")])
def test_bad_configs_say_what_is_wrong(bad, word):
    with pytest.raises(ValueError, match=word): GPT(GPTConfig(**{**TINY, **bad}))


def test_trillions_on_meta():
    n = num_params(GPTConfig(50_304, d_model=8192, num_layers=58, num_heads=64, d_hidden=4 * 8192, experts=every(2, 58, 128), activation="gelu"))
    assert abs(n.total / 2024.6e9 - 1) < 1e-3 and n.total / n.active > 40     # DeepSpeed-MoE, Table 6: 47B+MoE-128
    assert sum(t for t, _ in n.layers) < n.total


def test_balance_is_of_each_layer():           # L02: opposite imbalances of two layers must not cancel
    model = built(experts=2)
    for block, sign in zip(model.blocks, (1., -1.)):
        block.ffn.gate.router = torch.nn.Linear(16, 2).double()
        torch.nn.init.zeros_(block.ffn.gate.router.weight)
        block.ffn.gate.router.bias.data = torch.tensor([sign, -sign]).double()
    _, aux = model(torch.randint(50, (2, 8)))
    p = float(torch.tensor(2.).sigmoid())
    assert all(abs(a.balance.item() - 2 * p) < 1e-6 for a in aux)


def test_nothing_is_kept_between_forwards():   # L11
    import gc
    model, ids = built(experts=4), torch.randint(50, (2, 8))
    def alive(): gc.collect(); return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
    with torch.no_grad(): model(ids)
    before = alive()
    for _ in range(5):
        model(ids)
        with torch.no_grad(): model(ids)
    assert alive() <= before                                             # other tests' leftovers may go meanwhile
