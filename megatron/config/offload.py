"""The modules of a layer whose inputs --activation-offload can keep on the host."""

LAYER_INPUT = "layer_input"  # of a layer that is recomputed whole
INSIDE = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "mlp_fc1",
    "mlp_act",
    "mlp_fc2",
)
