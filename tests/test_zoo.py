"""The zoo's arithmetic against real modules on the meta device, against a FLOP counter, and against the papers' tables."""
import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moe_lab.models.gpt import GPT, num_params
from moe_lab.models.zoo import Attention, LatentAttention, Layer, Model, Recipe, WindowAttention, zoo


def on_meta(config, kind="AutoModelForCausalLM"):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        return getattr(transformers, kind).from_config(config) if kind.startswith("Auto") else getattr(transformers, kind)(config)


def hf(name, **sizes): return getattr(pytest.importorskip("transformers"), name + "Config")(**sizes)


def _qwen(m):
    l = m.layers[0]
    return hf("Qwen3Moe", vocab_size=m.vocab, hidden_size=l.d_model, num_hidden_layers=len(m.layers), num_attention_heads=l.attention.heads,
              num_key_value_heads=l.attention.kv_heads, head_dim=l.attention.head_dim, moe_intermediate_size=l.d_expert, num_experts=l.experts,
              num_experts_per_tok=l.top_k, tie_word_embeddings=False)


PUBLIC = {   # configs as transformers or the model cards have them, not as the zoo has them
    "Mixtral-8x7B": lambda: hf("Mixtral"),
    "Mixtral-8x22B": lambda: hf("Mixtral", vocab_size=32768, hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48, num_key_value_heads=8),
    "DeepSeek-V3": lambda: hf("DeepseekV3"),
    "Qwen3-30B-A3B": lambda: _qwen(zoo["Qwen3-30B-A3B"]),
    "Qwen3-235B-A22B": lambda: _qwen(zoo["Qwen3-235B-A22B"]),
    "OLMoE-1B-7B": lambda: hf("Olmoe", vocab_size=50304, hidden_size=2048, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=16, num_experts=64, num_experts_per_tok=8),
    "gpt-oss-20b": lambda: hf("GptOss", num_hidden_layers=24, num_local_experts=32),
    "gpt-oss-120b": lambda: hf("GptOss"),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_to_the_last_parameter(name):
    m, model = zoo[name], on_meta(PUBLIC[name]())
    n = m.num_params()
    assert sum(p.numel() for p in model.parameters()) == n.total
    routed = sum(p.numel() for k, p in model.named_parameters() if ".experts." in k)
    E, k = m.layers[-1].experts, m.layers[-1].top_k
    assert n.total - routed + routed // E * k == n.active
    for layer, (total, _) in zip(model.model.layers, n.layers): assert sum(p.numel() for p in layer.parameters()) == total


@pytest.mark.parametrize("name", ["350M", "1.3B", "6.7B"])
def test_dense_gpt_to_the_last_parameter(name):
    m = zoo[name]
    config = hf("GPT2", vocab_size=50304, n_positions=2048, n_embd=m.d_model, n_layer=len(m.layers), n_head=m.layers[0].attention.heads)
    assert sum(p.numel() for p in on_meta(config).parameters()) == m.num_params().total


@pytest.mark.parametrize("name,dim,heads", [("SwinV2-S", 96, 3), ("SwinV2-B", 128, 4)])
def test_swin_to_the_last_parameter(name, dim, heads):
    config = hf("Swinv2", image_size=192, embed_dim=dim, depths=[2, 2, 18, 2], num_heads=[heads * 2**i for i in range(4)], window_size=12, num_labels=21841)
    assert sum(p.numel() for p in on_meta(config, "Swinv2ForImageClassification").parameters()) == zoo[name].num_params().total


@pytest.mark.parametrize("name,billion", [
    ("350M+MoE-128", 13), ("1.3B+MoE-128", 52), ("350M+PR-MoE-32/64", 4), ("1.3B+PR-MoE-64/128", 31), ("350M+PR-MoE-32/64+MoS", 3.5), ("1.3B+PR-MoE-64/128+MoS", 27)])
def test_deepspeed_totals_round_to_the_print(name, billion):
    total = zoo[name].num_params().total / 1e9
    assert (round(total, 1) if billion == 3.5 else round(total)) == billion


@pytest.mark.parametrize("name,exact", [("350M", 355919872), ("350M+MoE-128", 13149534208), ("1.3B+MoE-128", 52471525376), ("350M+PR-MoE-32/64", 4116793368),
                                        ("1.3B+PR-MoE-64/128", 31391649816), ("350M+PR-MoE-32/64+MoS", 3541736468), ("1.3B+PR-MoE-64/128+MoS", 26944026644)])
def test_deepspeed_totals_by_the_closed_formula(name, exact):
    "V h + 2048 h + 2 h + L (12 h^2 + 13 h), and e F + e h instead of F, plus F + 2 h + 2 where the fixed MLP stays."
    assert zoo[name].num_params().total == exact


def test_printed_layers_of_table_6_cannot_be():
    "With the layer counts as printed, the 8B and 24B rows give 262 and 1396 billion."
    for name, printed, billion in (("8B+MoE-128", 30, 262.0), ("24B+MoE-128", 40, 1396.4)):
        m = zoo[name]
        assert replace(m, layers=m.layers[:2] * (printed // 2)).num_params().total / 1e9 == pytest.approx(billion, abs=.05)


def test_where_the_experts_are():
    experts = lambda name: [l.experts for l in zoo[name].layers]
    assert experts("350M+MoE-128") == [0, 128] * 12
    assert experts("350M+PR-MoE-32/64") == [0, 32] * 10 + [0, 64] * 2
    assert experts("1.3B+PR-MoE-64/128+MoS") == [0, 64] * 8 + [0, 128] * 2 + [0]
    swin = [l.experts for l in zoo["SwinV2-MoE-B-32"].layers]
    assert swin == [0] * 4 + [0, 32] * 10 and sum(map(bool, swin)) == 10
    assert [l.experts for l in zoo["DeepSeek-V3"].layers] == [0] * 3 + [256] * 58


def test_hybridep_expert_sizes():
    for name, million in (("Llama-Tiny", 2.1), ("Mistral-Small", 4.7), ("GPT-Medium", 8.4), ("GPT-Large", 8.4)):
        assert round(zoo[f"HybridEP {name}"].layers[0].expert() / 1e6, 1) == million


def test_megablocks_flops():
    for size, paper in (("XS", 316), ("Small", 879), ("Medium", 2487), ("Large", 5122), ("XL", 8684)):
        assert round(zoo[f"MegaBlocks {size}"].train_flops(1024, 1024) / 1e9) == paper


@pytest.mark.parametrize("layer", [
    Layer(32, Attention(4, 8), d_ffn=48), Layer(32, Attention(4, 8, kv_heads=2), d_ffn=48, glu=True),
    Layer(32, Attention(4, 8), experts=4, d_expert=24, top_k=2, glu=True), Layer(32, Attention(4, 8), d_ffn=40, experts=4, d_expert=24, top_k=1, mix=True)])
def test_flops_and_parameters_of_a_model_that_runs(layer):
    "Every matmul of our GPT, counted while it runs. The experts' operator is one call that the counter cannot see into: its rows come from aux."
    m, S = Model("toy", (layer,) * 2, vocab=64), 16
    gpt = GPT(m.gpt_config())
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH): _, auxes = gpt(torch.randint(64, (1, S)))
    rows = sum(int(aux.counts.sum()) for aux in auxes if aux is not None)
    assert counter.get_total_flops() + 2 * rows * layer._mlp(layer.d_expert) == S * m.flops_per_token(S)
    assert sum(p.numel() for p in gpt.parameters()) == m.num_params().total


def test_counterparts_on_meta():
    for name in ("350M+MoE-128", "1.3B+PR-MoE-64/128+MoS", "MegaBlocks XS+MoE-64"):
        m = zoo[name]
        c = m.gpt_config()
        assert c.layer_experts == tuple(l.experts for l in m.layers) and c.top_k == m.layers[1].top_k
        assert num_params(c).total == pytest.approx(m.num_params().total, rel=2e-3)
    for name in ("DeepSeek-V3", "Qwen3-30B-A3B", "SwinV2-S", "HybridEP GPT-Large"):
        with pytest.raises(ValueError, match="no counterpart"): zoo[name].gpt_config()


def test_training_cost_claim():
    "5x claimed, 5.31x measured (372 against 70 samples/s): the FLOP model is within 25 %."
    flops = zoo["6.7B"].train_flops() / zoo["1.3B+MoE-128"].train_flops()
    assert abs(flops / 5.31 - 1) < .25


def test_recipes():
    r = zoo["1.3B+MoE-128"].recipe
    assert (r.batch, r.lr, r.min_lr, r.balance, r.capacity_factor, r.betas) == (512, 1.2e-4, 1e-6, .01, 1., (.9, .95))
    assert zoo["350M+PR-MoE-32/64"].recipe.steps == 572_205 and r.steps == 286_102     # so MoS cannot stop at 400,000 there
    assert Recipe().steps is None and zoo["DeepSeek-V3"].recipe.bias_rate == 1e-3


def test_errors_name_what_is_missing():
    with pytest.raises(KeyError, match="350M.MoE-128"): zoo["350M+MoE-129"]
    with pytest.raises(ValueError, match="context"): zoo["SwinV2-S"].flops_per_token()
    with pytest.raises(ValueError, match="language models"): zoo["SwinV2-S"].flops_per_token(10)
    with pytest.raises(ValueError, match="tokens"): zoo["Mixtral-8x7B"].train_flops()


def test_every_model_says_where_it_comes_from():
    for name, m in zoo.items():
        assert m.name == name and m.source and m.num_params().active <= m.num_params().total
        assert math.isfinite(m.weight_bytes()) and m.train_bytes() == 16 * m.num_params().total


def test_parts():
    assert LatentAttention(2, 3, 5, 7, 1, 4).weights(10) == 3 * (10 + 2 * 8) + 10 * 6 + 5 * 2 * 11 + 2 * 4 * 10
    assert LatentAttention(2, 3, 5, 7, 1, 4).scores() == 2 * (8 + 4) and WindowAttention(2).weights(8) == 256


def test_command_line(capsys):
    from moe_lab.cli import main
    assert main(["zoo"]) == 0 and capsys.readouterr().out.count("\n") == len(zoo)
    assert main(["zoo", "--model", "1.3B+MoE-128", "--context", "1024"]) == 0
    out = capsys.readouterr().out
    assert "52.472 B parameters" in out and "12 layers of width 2048, top-1 of 128 experts of 8192" in out
    assert main(["zoo", "--model", "1.3B+MoE"]) == 2 and "1.3B+MoE-128" in capsys.readouterr().err
