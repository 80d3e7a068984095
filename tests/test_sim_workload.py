"from_hf counts what transformers builds."
import pytest
import torch

from moe_lab.sim.workload import from_hf

transformers = pytest.importorskip("transformers")
SMALL = dict(hidden_size=256, vocab_size=512, num_attention_heads=8, num_hidden_layers=4, intermediate_size=512, pad_token_id=0, bos_token_id=0, eos_token_id=0)
CASES = {
    "llama": {}, "mixtral": dict(num_key_value_heads=2),
    "qwen3_moe": dict(num_key_value_heads=4, head_dim=64, moe_intermediate_size=96, num_experts=16, num_experts_per_tok=4, decoder_sparse_step=2),
    "qwen2_moe": dict(moe_intermediate_size=96, num_experts=16, num_experts_per_tok=4, shared_expert_intermediate_size=160, mlp_only_layers=[1]),
    "deepseek_v3": dict(moe_intermediate_size=64, n_routed_experts=16, n_shared_experts=2, num_experts_per_tok=4, first_k_dense_replace=1, n_group=4, topk_group=2,
                        q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
    "deepseek_v2": dict(moe_intermediate_size=64, n_routed_experts=16, n_shared_experts=2, num_experts_per_tok=4, first_k_dense_replace=1, topk_group=1, n_group=1,
                        q_lora_rank=None, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
    "glm4_moe": dict(moe_intermediate_size=64, n_routed_experts=16, num_experts_per_tok=4, first_k_dense_replace=1, n_group=1, topk_group=1),
    "gpt_oss": dict(num_local_experts=16, num_experts_per_tok=4, head_dim=32, num_key_value_heads=4),
    "olmoe": dict(num_experts=16, num_experts_per_tok=4),
    "llama4_text": dict(num_local_experts=8, interleave_moe_layer_step=2, intermediate_size_mlp=768, head_dim=32),
    "ernie4_5_moe": dict(moe_intermediate_size=64, moe_num_experts=16, moe_k=4, moe_num_shared_experts=2, moe_layer_end_index=3),
}


@pytest.mark.parametrize("kind", CASES)
def test_parameters_as_transformers_builds_them(kind):
    cls = transformers.CONFIG_MAPPING[kind]
    config = cls(**SMALL | CASES[kind])
    with torch.device("meta"): model = transformers.AutoModelForCausalLM.from_config(config)
    want = sum(p.numel() for p in model.parameters())
    spec = from_hf(config.to_dict())
    assert spec.num_params().total == pytest.approx(want, rel=.01), (spec, want)
    moe = sum(1 for n, p in model.named_parameters() if "experts" in n and n.endswith("down_proj"))
    assert sum(l.experts > 0 for l in spec.layers) == moe


OPTIONAL = ("num_key_value_heads", "head_dim", "mlp_only_layers", "moe_layer_freq", "first_k_dense_replace", "q_lora_rank", "decoder_sparse_step", "moe_layers", "interleave_moe_layer_step",
            "moe_layer_interval", "moe_layer_end_index", "n_shared_experts", "shared_expert_intermediate_size", "attention_bias", "tie_word_embeddings", "intermediate_size_mlp")

@pytest.mark.parametrize("kind", CASES)
def test_nulls_are_read_as_transformers_reads_them(kind):
    "Each optional key as null: where transformers builds a model from that, we count its parameters; else an answer or a ValueError, never another error."
    cls = transformers.CONFIG_MAPPING[kind]
    whole, agreed = cls(**SMALL | CASES[kind]).to_dict(), 0
    for key in (k for k in OPTIONAL if k in whole):
        config = whole | {key: None}
        try: ours = from_hf(config).num_params().total
        except ValueError: ours = None
        try:
            with torch.device("meta"): want = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(cls.from_dict(config)).parameters())
        except Exception: continue      # transformers makes nothing of it
        assert ours == pytest.approx(want, rel=.01), key
        agreed += 1
    assert agreed or kind in ("glm4_moe", "gpt_oss", "ernie4_5_moe")      # these take no null at all
