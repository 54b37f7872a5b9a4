"""The flags that the oracle knows, with their defaults as docs/flags.md states them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

VALUES: dict[type, str] = {
    int: """
        num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels num-query-groups
        max-position-embeddings rope-original-max-position-embeddings=8192 window-size
        make-vocab-size-divisible-by=128 loss-scale-window=1000 hysteresis=2 seq-length
        vocab-size micro-batch-size global-batch-size train-iters train-samples exit-interval
        seed=1234 lr-decay-iters lr-decay-samples lr-warmup-iters=0 lr-warmup-samples=0
        num-experts moe-ffn-hidden-size moe-router-topk=2 moe-router-num-groups
        moe-router-group-topk moe-shared-expert-intermediate-size
        lr-wsd-decay-iters lr-wsd-decay-samples eval-iters=100 eval-interval=1000
        log-interval=100 save-interval
    """,
    float: """
        rotary-base=10000 rotary-percent=1 rotary-seq-len-interpolation-factor
        rope-scaling-factor=8 rope-low-freq-factor=1 rope-high-freq-factor=4 yarn-beta-fast=32
        yarn-beta-slow=1 norm-epsilon=1e-5 attn-logit-softcapping final-logit-softcapping
        z-loss-coeff=0 hidden-dropout=0.1 attention-dropout=0.1 init-method-std=0.02 loss-scale
        initial-loss-scale=4294967296 min-loss-scale=1 lr min-lr=0 lr-warmup-fraction
        lr-warmup-init=0 decoupled-lr decoupled-min-lr weight-decay=0.01 start-weight-decay
        moe-router-topk-scaling-factor moe-router-bias-update-rate=1e-3 moe-z-loss-coeff=0
        moe-expert-capacity-factor moe-input-jitter-eps=0
        end-weight-decay clip-grad=1 adam-beta1=0.9 adam-beta2=0.999 adam-eps=1e-8 sgd-momentum=0.9
    """,
    str: """
        position-embedding-type=learned_absolute normalization=LayerNorm activation=gelu
        split=969,30,1 tokenizer-type optimizer=adam lr-decay-style=linear
        lr-wsd-decay-style=exponential weight-decay-incr-style=constant save load 
        moe-router-score-function=softmax moe-layer-freq=1 moe-token-drop-policy=probs
        nan-policy=stop freeze recompute-granularity recompute-method recompute-num-layers
        window-attn-skip-freq no-rope-freq
    """,
}
SWITCHES = """
    group-query-attention use-rope-scaling disable-bias-linear add-qkv-bias qk-layernorm
    untie-embeddings-and-output-weights bf16 fp16 fp64 mock-data reset-position-ids
    reset-attention-mask eod-mask-loss finetune skip-train log-params-norm log-num-zeros-in-grad
    moe-router-pre-softmax moe-router-enable-expert-bias moe-shared-expert-gate
    override-opt-param-scheduler fused-linear-cross-entropy no-load-optim
"""
LISTS = """
    data-path train-data-path valid-data-path test-data-path rampup-batch-size accept-changed
    moe-router-load-balancing-type moe-aux-loss-coeff
"""


def _parser() -> ArgumentParser:
    parser = ArgumentParser(allow_abbrev=False)
    for kind, names in VALUES.items():
        for flag in names.split():
            name, _, default = flag.partition("=")
            parser.add_argument(f"--{name}", type=kind, default=kind(default) if default else None)
    for name in SWITCHES.split():
        parser.add_argument(f"--{name}", action="store_true")
    for name in LISTS.split():
        parser.add_argument(f"--{name}", nargs="+")
    return parser


def read(argv: list[str]) -> Namespace:
    """The settings of a command line, with every size that follows from another filled in."""
    s = _parser().parse_args(argv)
    s.gated = s.activation in ("swiglu", "geglu")
    s.bias = not s.disable_bias_linear
    s.rotates = s.position_embedding_type in ("rope", "yarn")
    s.vocabulary = s.vocab_size + 1  # of the NullTokenizer, whose end of document is the last id
    s.eod = s.vocab_size
    s.kv_channels = s.kv_channels or s.hidden_size // s.num_attention_heads
    if not s.group_query_attention:
        s.num_query_groups = s.num_attention_heads
    if s.ffn_hidden_size is None:
        s.ffn_hidden_size = s.hidden_size * 8 // 3 // 64 * 64 if s.gated else 4 * s.hidden_size
    s.max_position_embeddings = s.max_position_embeddings or s.seq_length
    s.global_batch_size = s.global_batch_size or s.micro_batch_size
    s.moe_router_load_balancing_type = s.moe_router_load_balancing_type or ["aux_loss"]
    s.moe_aux_loss_coeff = s.moe_aux_loss_coeff or ["0"]
    s.rampup = tuple(map(int, s.rampup_batch_size)) if s.rampup_batch_size else None
    return s
