"""An independent oracle: our weights in Hugging Face's models give the same loss and the same
gradient of every logical tensor.

float64 is the gate (relative Frobenius norm 1e-10); fp32 within 1e-5. transformers widens some
steps to *float32* whatever the model's precision (RMSNorm, rotary tables, scores of routers); in
the float64 rows these names mean float64.
"""

import contextlib
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from huggingface_models import MODELS, family
from megatron.tools._convert.huggingface import to_huggingface
from unit.by_hand import backward, forward, loss_gradient
from unit.checkpoint.huggingface_names import made_of

from megatron.config.groups import ModelConfig
from megatron.model.gpt import GPTModel
from megatron.model.init import fill_initial
from megatron.parallel.blocks import build_blocks
from megatron.parallel.layer_runner import LayerRunner

transformers = pytest.importorskip("transformers")

VOCAB, PADDED, S, B = 117, 128, 24, 3
FUSED = int(transformers.__version__.partition(".")[0]) >= 5


def tokens():
    return torch.randint(0, VOCAB, (B, S + 1), generator=torch.Generator().manual_seed(0))


def our_run(config: ModelConfig, dtype: torch.dtype):
    """(mean loss, {logical name: weight}, {logical name: gradient}) of our model on the fixed
    tokens.
    """
    config = dataclasses.replace(config, init_method_std=0.2)
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
    passes = LayerRunner()
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


@contextlib.contextmanager
def wide():
    """What transformers computes in float32 whatever the model's precision, and would write as
    torch.float32, torch.float or .float(), is float64 inside.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def exported(config: ModelConfig, tensors, kind: str):
    """config.json and the tensors (weights, or gradients: the export is linear but for the offset
    of a norm) as the rules give them.
    """
    described, rules = to_huggingface(config, VOCAB, kind=kind, fused=FUSED)
    return described, rules, {rule.theirs: made_of(rule, tensors) for rule in rules}


def their_run(config: ModelConfig, weights, dtype, kind: str):
    """(mean loss, {Hugging Face name: gradient}) with the exported weights."""
    with wide() if dtype == torch.float64 else contextlib.nullcontext():
        hf_config, _, theirs = exported(config, weights, kind)
        arguments = {
            name: value
            for name, value in hf_config.items()
            if name not in ("model_type", "architectures")
        }
        hf = transformers.AutoConfig.for_model(hf_config["model_type"], **arguments)
        model = transformers.AutoModelForCausalLM.from_config(hf, attn_implementation="sdpa")
        model = model.to(dtype).eval()
        missing, unexpected = model.load_state_dict(theirs, strict=False)
        assert not unexpected and all("lm_head" in name for name in missing)  # a tied head
        model.tie_weights()
        if FUSED:
            model.set_experts_implementation("eager")  # the others take no float64
        ids = tokens()
        logits = model(ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def compare(config: ModelConfig, dtype, bound: float, kind: str) -> None:
    """The same loss and the same gradient of every tensor."""
    loss, weights, grads = our_run(config, dtype)
    their_loss, their_grads = their_run(config, weights, dtype, kind)
    assert abs(loss - their_loss) <= bound * abs(their_loss)
    # what is not trained has no gradient, on either side
    grads = {name: grads.get(name, torch.zeros_like(value)) for name, value in weights.items()}
    _, rules, ours_in_their_names = exported(config, grads, kind)
    compared = 0
    total = math.sqrt(sum(g.double().square().sum() for g in their_grads.values()))
    for rule in rules:
        if rule.theirs not in their_grads:
            continue
        ours, theirs = ours_in_their_names[rule.theirs] + rule.offset, their_grads[rule.theirs]
        # A key bias shifts all scores of a query alike, and one weight of one is 1 whatever its
        # score: the true gradient is 0, so noise is measured against the whole gradient.
        noise = rule.theirs.endswith("k_proj.bias") or (
            rule.theirs.endswith("mlp.gate.weight") and config.moe_router_topk == 1
        )
        scale = total if noise else theirs.norm()
        assert scale > 0 and (ours - theirs).norm() <= bound * scale, rule.theirs
        compared += 1
    assert compared == len(their_grads)


@pytest.mark.parametrize(
    "dtype, bound", [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_transformers(name, dtype, bound):
    compare(MODELS[name], dtype, bound, family(name))


def test_what_would_hide_a_mistake_of_latent_attention():
    """The biases that choose experts differ, and positions outrun the length of YaRN."""
    model = MODELS["deepseek_v3"]
    _, weights, _ = our_run(model, torch.float64)
    assert weights["layers.1.mlp.router.expert_bias"].unique().numel() == 8
    assert S > model.rope_original_max_position_embeddings
