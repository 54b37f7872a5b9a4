"""An independent oracle: our weights in Hugging Face's models give the same loss and the same
gradient of every logical tensor.

float64 is the gate (relative Frobenius norm 1e-10); fp32 within 1e-5. transformers widens some
steps to *float32* whatever the model's precision (RMSNorm, rotary tables, Llama's eager softmax);
the float64 rows replace those functions by the same formula in float64.
"""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from unit.by_hand import backward, forward
from unit.checkpoint.huggingface_names import made_of

from megatron.config.groups import ModelConfig
from megatron.interop.huggingface import to_huggingface
from megatron.model.gpt import GPTModel
from megatron.model.init import fill_initial
from megatron.optimizer.blocks import build_blocks
from megatron.parallel.layer_passes import LayerPasses
from megatron.parallel.pipeline import loss_gradient

transformers = pytest.importorskip("transformers")

VOCAB, PADDED, S, B = 117, 128, 24, 3
FUSED = int(transformers.__version__.partition(".")[0]) >= 5

GPT2 = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=128,
    num_attention_heads=4,
    kv_channels=8,
    num_query_groups=4,
    max_position_embeddings=S,
    activation="gelu-tanh",
    hidden_dropout=0.0,
    attention_dropout=0.0,
    init_method_std=0.2,
)
LLAMA = dataclasses.replace(
    GPT2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    ffn_hidden_size=88,
    num_query_groups=2,
    group_query_attention=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
MIXTRAL = dataclasses.replace(LLAMA, num_experts=6, moe_ffn_hidden_size=24)
MODELS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "llama-tied": dataclasses.replace(LLAMA, untie_embeddings_and_output_weights=False),
    "llama3-scaled": dataclasses.replace(
        LLAMA, use_rope_scaling=True, rope_original_max_position_embeddings=16, rotary_base=500.0
    ),
    "llama-linear": dataclasses.replace(LLAMA, rotary_seq_len_interpolation_factor=2.0),
    "llama-yarn": dataclasses.replace(
        LLAMA,
        position_embedding_type="yarn",
        rope_scaling_factor=4.0,
        rope_original_max_position_embeddings=8,
    ),
    "mistral-window": dataclasses.replace(LLAMA, window_size=5),
    "qwen2": dataclasses.replace(LLAMA, add_qkv_bias=True),
    "qwen3": dataclasses.replace(LLAMA, qk_layernorm=True),
    "mixtral": MIXTRAL,
    "mixtral-top-1": dataclasses.replace(MIXTRAL, moe_router_topk=1, window_size=5),
    "qwen2-moe": dataclasses.replace(
        MIXTRAL,
        add_qkv_bias=True,
        moe_router_pre_softmax=True,
        moe_shared_expert_intermediate_size=40,
        moe_shared_expert_gate=True,
    ),
    "qwen3-moe": dataclasses.replace(MIXTRAL, qk_layernorm=True, moe_router_topk=4),
    "qwen3-moe-plain": dataclasses.replace(
        MIXTRAL, qk_layernorm=True, moe_router_pre_softmax=True, moe_layer_freq="[0]*1+[1]*1"
    ),
}


def tokens():
    return torch.randint(0, VOCAB, (B, S + 1), generator=torch.Generator().manual_seed(0))


def our_run(config: ModelConfig, dtype: torch.dtype):
    """(mean loss, {logical name: weight}, {logical name: gradient}) of our model on the fixed
    tokens.
    """
    model = GPTModel(config, vocab_size=VOCAB, padded_vocab=PADDED, dtype=dtype, seed=1)
    weights, grads = {}, {}
    for block in build_blocks(model, torch.device("cpu")):
        block.open()
        for entry in block.entries:
            for box in entry.boxes:
                fill_initial(box, entry.view(block.weight), 1)
                if box.name.endswith(("bias", "norm.weight")):  # zeros and ones hide mistakes
                    view = box.view(entry.view(block.weight))
                    view.add_(
                        0.3 * torch.sin(torch.arange(view.numel(), dtype=dtype)).view(view.shape)
                    )
                weights[box.name] = box.view(entry.view(block.weight)).reshape(box.extent)
    for _, parameter, spec in model.declared():
        if spec.group == "expert":
            parameter.main_grad.fill_(torch.nan)  # an expert without a token must clear its own
            parameter.overwrite_main_grad = True
    ids = tokens()
    positions = torch.arange(S).expand(B, S)
    micro = model.micro_batch(
        ids[:, :-1], ids[:, 1:], torch.ones(B, S), positions, torch.arange(B), training=True
    )
    passes = LayerPasses()
    sums, saved = forward(model, micro, passes)
    backward(model, saved, loss_gradient(sums, 1 / (B * S)), passes)
    for name, parameter, spec in model.declared():
        for box in spec.boxes() if parameter.requires_grad else ():
            grads[box.name] = box.view(parameter.main_grad).reshape(box.extent)
            if spec.group == "expert":
                continue
            # padded rows have no gradient
            alone = len(spec.tensors) == 1
            assert not alone or parameter.main_grad[box.extent[0] :].abs().sum() == 0, name
    return sums[1].item() / (B * S), weights, grads


def widen(model):
    """Replace transformers' fixed float32 steps by the same formulas in float64."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            eps = getattr(module, "variance_epsilon", None)

            def norm(x, module=module, eps=eps):
                return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

            module.forward = norm
        if type(module).__name__.endswith("TopKRouter"):
            # Mixtral has no norm_topk_prob: it normalises always
            normalises = getattr(module, "norm_topk_prob", True)

            def router(x, module=module, normalises=normalises):
                logits = F.linear(x.flatten(0, -2), module.weight)
                values, chosen = torch.topk(torch.softmax(logits, -1), module.top_k, -1)
                total = values.sum(-1, keepdim=True) if normalises else 1
                return logits, values / total, chosen

            module.forward = router
        if type(module).__name__.endswith("RotaryEmbedding"):
            frequencies = wide_frequencies(module.config)

            def rotary(x, position_ids, module=module, frequencies=frequencies):
                angle = position_ids[:, :, None].double() * frequencies
                angle = torch.cat([angle, angle], -1)
                return (angle.cos() * module.attention_scaling).to(x.dtype), (
                    angle.sin() * module.attention_scaling
                ).to(x.dtype)

            module.forward = rotary


def wide_frequencies(config):
    """transformers' own frequency rules, run with float64 as the default dtype and its float32
    casts undone.
    """
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    dim = (
        config.head_dim
        if getattr(config, "head_dim", None)
        else config.hidden_size // config.num_attention_heads
    )
    base = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2).double() / dim))
    if kind == "default":
        return base
    if kind == "linear":
        return base / rope["factor"]
    narrow, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    ratio = narrow.double() / base  # the blend of scaled and unscaled frequencies, known to 1e-7
    if kind == "llama3":
        old, low, high = (
            rope["original_max_position_embeddings"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
        )
        wavelength = 2 * math.pi / base
        smooth = (old / wavelength - low) / (high - low)
        exact = torch.where(
            wavelength > old / low,
            base / rope["factor"],
            torch.where(
                wavelength < old / high, base, (1 - smooth) * base / rope["factor"] + smooth * base
            ),
        )
    else:
        old, beta_fast, beta_slow = (
            rope["original_max_position_embeddings"],
            rope.get("beta_fast", 32),
            rope.get("beta_slow", 1),
        )
        bounds = [
            dim * math.log(old / (n * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))
            for n in (beta_fast, beta_slow)
        ]
        low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), dim - 1)
        ramp = ((torch.arange(dim // 2).double() - low) / max(high - low, 0.001)).clamp(0, 1)
        exact = base / rope["factor"] * ramp + base * (1 - ramp)
    # the float64 formula is the one transformers runs
    torch.testing.assert_close(exact / base, ratio, rtol=1e-6, atol=1e-6)
    return exact


def exported(config: ModelConfig, tensors):
    """config.json and the tensors (weights, or gradients: the export is linear) as the rules
    say.
    """
    described, rules = to_huggingface(config, VOCAB, fused=FUSED)
    return described, {rule.theirs: made_of(rule, tensors) for rule in rules}


def their_run(config: ModelConfig, weights, dtype):
    """(mean loss, {Hugging Face name: gradient}) with the exported weights."""
    hf_config, theirs = exported(config, weights)
    kind = hf_config["model_type"]
    arguments = {
        name: value
        for name, value in hf_config.items()
        if name not in ("model_type", "architectures")
    }
    hf = transformers.AutoConfig.for_model(kind, **arguments)
    hf._attn_implementation = "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(hf, attn_implementation="sdpa").to(dtype)
    missing, unexpected = model.load_state_dict(theirs, strict=False)
    assert not unexpected and all("lm_head" in name for name in missing)  # a tied head
    model.tie_weights()
    model.eval()
    if FUSED:
        model.set_experts_implementation("eager")  # the others take no float64
    if dtype == torch.float64:
        widen(model)
    ids = tokens()
    logits = model(ids[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "dtype, bound", [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_transformers(name, dtype, bound):
    config = MODELS[name]
    loss, weights, grads = our_run(config, dtype)
    their_loss, their_grads = their_run(config, weights, dtype)
    assert abs(loss - their_loss) <= bound * abs(their_loss)
    _, ours_in_their_names = exported(config, grads)
    compared = 0
    total = math.sqrt(sum(g.double().square().sum() for g in their_grads.values()))
    for hf_name, ours in ours_in_their_names.items():
        if hf_name not in their_grads:
            continue
        theirs = their_grads[hf_name]
        # A key bias shifts all scores of a query alike, and one weight of one is 1 whatever its
        # score: the true gradient is 0, so noise is measured against the whole gradient.
        noise = hf_name.endswith("k_proj.bias") or (
            hf_name.endswith("mlp.gate.weight") and config.moe_router_topk == 1
        )
        scale = total if noise else theirs.norm()
        assert (ours - theirs).norm() <= bound * scale, hf_name
        compared += 1
    assert compared == len(their_grads)
