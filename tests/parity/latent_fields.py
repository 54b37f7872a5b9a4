"""Fields of small models with DeepSeek-V3's attention and experts, which the oracle and the tests
of Hugging Face's format put into their models.
"""

LATENT = {
    "group_query_attention": False,
    "norm_epsilon": 1e-6,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 6,
    "kv_channels": 14,
    "v_head_dim": 10,
}
YARN = {
    "position_embedding_type": "yarn",
    "rope_scaling_factor": 4.0,
    "rope_original_max_position_embeddings": 8,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
ROUTED = {
    "num_experts": 8,
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 4,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 48,
}
