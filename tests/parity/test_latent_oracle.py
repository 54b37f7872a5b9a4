"""Latent attention against transformers' DeepSeek-V3, dense and with experts: the same loss and the
same gradient of every tensor, in float64.

transformers computes norms, rotary tables and router scores in float32 whatever the model's
precision; they are replaced by the same formulas in float64.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from parity.latent_fields import LATENT, ROUTED, YARN
from parity.test_huggingface_oracle import LLAMA, VOCAB, S, our_run, tokens, wide_frequencies

from megatron.config.groups import ModelConfig
from megatron.interop.deepseek import to_deepseek

transformers = pytest.importorskip("transformers")

BOUND = 1e-10  # relative Frobenius norm
DENSE = dataclasses.replace(LLAMA, num_query_groups=4, q_lora_rank=20, **LATENT)
SCALED = dataclasses.replace(DENSE, rotary_base=100.0, **YARN)
EXPERTS = dataclasses.replace(SCALED, num_layers=3, moe_layer_freq="[0]*1+[1]*2", **ROUTED)
MODELS = {
    "dense": DENSE,
    "whole-queries": dataclasses.replace(DENSE, q_lora_rank=None),
    "yarn": SCALED,
    "yarn-plain": dataclasses.replace(SCALED, mscale=1.0, mscale_all_dim=0.0),
    "experts": EXPERTS,
    "one-group": dataclasses.replace(
        EXPERTS, moe_router_num_groups=None, moe_router_group_topk=None, moe_router_topk=3
    ),
}


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of files by the names in memory: the experts of a layer are in one tensor."""
    found, experts = {}, {}
    for name, value in tensors.items():
        layer, inside, rest = name.partition(".experts.")
        if not inside:
            found[name] = value
            continue
        number, part, _ = rest.split(".")
        experts.setdefault(layer, {})[int(number), part] = value
    for layer, parts in experts.items():
        count = 1 + max(number for number, _ in parts)
        pairs = [torch.cat([parts[i, "gate_proj"], parts[i, "up_proj"]]) for i in range(count)]
        found[f"{layer}.experts.gate_up_proj"] = torch.stack(pairs)
        found[f"{layer}.experts.down_proj"] = torch.stack(
            [parts[i, "down_proj"] for i in range(count)]
        )
    return found


def widen(model):
    """Replace transformers' fixed float32 steps by the same formulas in float64."""
    for module in model.modules():
        kind = type(module).__name__
        if kind == "DeepseekV3RMSNorm":

            def norm(x, module=module):
                scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
                return module.weight * (x * scale)

            module.forward = norm
        if kind == "DeepseekV3RotaryEmbedding":
            frequencies = wide_frequencies(module.config)

            def rotary(x, position_ids, module=module, frequencies=frequencies):
                angle = position_ids[:, :, None].double() * frequencies
                angle = torch.cat([angle, angle], -1)
                scale = module.attention_scaling
                return angle.cos() * scale, angle.sin() * scale

            module.forward = rotary
        if kind == "DeepseekV3TopkRouter":
            # scores are those of the module's own forward pass, with no float32 in between
            module.forward = lambda x, module=module: wide_router(module, x)


def wide_router(module, x):
    """The forward pass of the router as it stands, where float32 means float64."""
    narrow, torch.float32 = torch.float32, torch.float64
    try:
        return type(module).forward(module, x)
    finally:
        torch.float32 = narrow


def their_run(config: ModelConfig, weights):
    """(mean loss, {name: gradient}, names of files -> ours) with the exported weights."""
    described, rules = to_deepseek(config, VOCAB)
    own = {rule.theirs: rule.ours[0] for rule in rules}
    arguments = {
        name: value
        for name, value in described.items()
        if name not in ("model_type", "architectures")
    }
    hf = transformers.AutoConfig.for_model(described["model_type"], **arguments)
    model = transformers.AutoModelForCausalLM.from_config(hf, attn_implementation="sdpa").double()
    model.set_experts_implementation("eager")
    tensors = fused({theirs: weights[ours] for theirs, ours in own.items()})
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and not missing
    model.eval()
    widen(model)
    ids = tokens()
    loss = F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}, own


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_transformers(name):
    config = MODELS[name]
    loss, weights, grads = our_run(config, torch.float64)
    their_loss, their_grads, own = their_run(config, weights)
    assert abs(loss - their_loss) <= BOUND * abs(their_loss)
    trained = {
        theirs: grads[ours] for theirs, ours in own.items() if not ours.endswith("expert_bias")
    }
    ours_in_their_names = fused(trained)
    assert ours_in_their_names.keys() == their_grads.keys()
    for hf_name, theirs in their_grads.items():
        assert theirs.norm() > 0
        assert (ours_in_their_names[hf_name] - theirs).norm() <= BOUND * theirs.norm(), hf_name


def test_what_would_hide_a_mistake():
    """The biases that choose experts differ, and positions outrun the length of YaRN."""
    _, weights, _ = our_run(EXPERTS, torch.float64)
    assert weights["layers.1.mlp.router.expert_bias"].unique().numel() == 8
    assert S > EXPERTS.rope_original_max_position_embeddings
