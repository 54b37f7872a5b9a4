"""The arguments kept in a Megatron-LM checkpoint as fields of ModelConfig.

Every argument is mapped, or changes the forward pass and must be at its default (`FORWARD`), or is
known to change nothing (`HARMLESS`), or unknown and off. Any other is refused by name.

Facts of Megatron-LM (core 0.5 to August 2026): latent attention takes YaRN unless --rope-type rope,
with --rotary-scaling-factor, original length 4096 and betas 32 and 1; it scales the scores by
YaRN's factor in both cases. YaRN of common attention reads the arguments with the prefix yarn_ and,
where they are missing, --rotary-scaling-factor.
"""

from __future__ import annotations

import dataclasses
import reprlib
from typing import Any

from megatron.tools._convert.pickles import Record, state_of

from megatron.config.compatibility import recorded_names
from megatron.config.errors import UserError
from megatron.config.metadata import flag_name
from megatron.config.model import ModelConfig, yarn_scale

# taken over under the same name where they are there
SAME = """num_layers hidden_size ffn_hidden_size num_attention_heads max_position_embeddings
    rotary_base rotary_percent normalization add_bias_linear add_qkv_bias qk_layernorm
    untie_embeddings_and_output_weights hidden_dropout attention_dropout init_method_std
    make_vocab_size_divisible_by multi_latent_attention num_experts""".split()
LATENT = "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim".split()
EXPERTS = """moe_ffn_hidden_size moe_router_topk moe_router_score_function moe_router_pre_softmax
    moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor
    moe_router_enable_expert_bias moe_router_bias_update_rate moe_z_loss_coeff moe_input_jitter_eps
    moe_expert_capacity_factor moe_token_drop_policy moe_shared_expert_intermediate_size
    moe_shared_expert_gate""".split()
BALANCING = {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}

# What changes the forward pass or the layout of the weights and is not mapped -> its values that
# change nothing, Megatron-LM's default first.
OFF = (None, False)
FORWARD: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        """apply_residual_connection_post_layernorm rotary_interleaved quick_geglu qk_l2_norm
        attention_output_gate use_mup enable_mhc_connections is_hybrid_model mla_down_proj_fusion
        moe_apply_probs_on_input moe_router_force_load_balancing retro_add_retriever flextron
        heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json spec
        activation_func_clamp_value softmax_scale experimental_attention_variant
        linear_attention_freq hybrid_layer_pattern hybrid_override_pattern mrope_section
        moe_latent_size moe_router_topk_limited_devices moe_router_force_biased
        moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size
        moe_expert_rank_capacity_factor compression_training""".split(),
        OFF,
    ),
    "softmax_type": ("vanilla", None),
    "glu_linear_offset": (0.0, None),
    "mtp_num_layers": (None, 0),
    "hybrid_attention_ratio": (0.0, None),
    "hybrid_mlp_ratio": (0.0, None),
    "yarn_correction_range_round_to_int": (None, True),
    "mlp_type": ("standard", None),
}
# Arguments that Megatron-LM and Megatron-DeepSpeed compute, or that have no flag of their own name.
_OTHERS = """_is_global_batch_size_explicitly_specified apply_rope_fusion barrier_with_L1_time
    bert_binary_head consumed_train_samples consumed_train_tokens consumed_valid_samples
    cpu_offloading curr_iteration curriculum_learning_legacy curriculum_seqlen data_parallel_size
    deepspeed_config_dict ds_pipeline_enabled enable_gloo_process_groups fp4 fp8 iteration
    logit_dtype microbatch_group_size_per_vp_stage model_type mup_width_mult muon_split_qkv
    num_floating_point_operations_so_far overlap_p2p_comm overlap_p2p_comm_warmup_flush params_dtype
    perform_initialization rank retro_verify_neighbor_count skipped_train_samples
    torch_fsdp2_reshard_after_forward transformer_pipeline_model_parallel_size
    use_contiguous_buffers_in_local_ddp use_gloo_process_groups variable_seq_lengths
    virtual_pipeline_model_parallel_size world_size""".split()


def _arguments_of_flags() -> set[str]:
    """The names that other programs' flags have as arguments, with and without what negates."""
    plain = {name[2:].replace("-", "_") for name in recorded_names()}
    return plain | {
        name.removeprefix(start)
        for name in plain
        for start in ("no_", "disable_")
        if name.startswith(start)
    }


HARMLESS = _arguments_of_flags() | set(_OTHERS)


class _Arguments:
    """The arguments by name, recording which were read: these are mapped."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """An argument; the default where it is missing or None."""
        self.read.add(name)
        value = self.given.get(name)
        return default if value is None else value

    def take(self, *names: str) -> dict[str, Any]:
        """Those of the names that have a value."""
        found = {name: self.get(name) for name in names}
        return {name: value for name, value in found.items() if value is not None}


def model_fields(args: Record) -> dict[str, Any]:
    """Fields of ModelConfig that the arguments kept in a Megatron-LM checkpoint mean. Raises
    UserError naming what has no counterpart.
    """
    arguments = _Arguments(state_of(args))
    needed = "num_layers", "hidden_size", "num_attention_heads"
    faults = [f"no {name}" for name in needed if type(arguments.get(name)) is not int]
    if not faults:
        try:
            fields = _fields(arguments, faults)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise _refusal([f"an argument is not of its type: {error}"]) from error
        faults += _unmapped(arguments)
    if faults:
        raise _refusal(faults)
    return fields


def argument_notes(args: Any) -> tuple[str, ...]:
    """Lines about arguments that versions of Megatron-LM have ignored."""
    given = state_of(args)
    factor = given.get("rope_scaling_factor", 8.0)
    stretch = given.get("rotary_seq_len_interpolation_factor")
    notes = []
    if given.get("use_rope_scaling") and factor != 8:
        notes.append(
            f"note: --rope-scaling-factor {factor}: Megatron-LM before its fix of August 2026 "
            "computed with 8 whatever this flag was; compare the loss, and for such a model set "
            "8 in --config"
        )
    if given.get("openai_gelu") and _activation(_Arguments(given)) == "gelu":
        notes.append(
            "note: --openai-gelu: core models of Megatron-LM ignore this flag and compute the "
            "exact gelu; for a model that was trained with the tanh form set gelu-tanh in --config"
        )
    if stretch not in (None, 1):
        notes.append(
            f"note: --rotary-seq-len-interpolation-factor {stretch}: core models of Megatron-LM up "
            "to core 0.16 ignored this flag; compare the loss, and for such a model leave it out "
            "in --config"
        )
    return tuple(notes)


def stores_norms_minus_one(args: Any) -> bool:
    """Whether the weights of norms are stored minus one (--apply-layernorm-1p)."""
    given = state_of(args)
    return bool(given.get("apply_layernorm_1p") or given.get("layernorm_zero_centered_gamma"))


def _refusal(faults: list[str]) -> UserError:
    return UserError("the arguments in the checkpoint cannot be taken over: " + "; ".join(faults))


def _shown(name: str, value: Any) -> str:
    return f"{flag_name(name)} {reprlib.repr(value)}"


def _unmapped(arguments: _Arguments) -> list[str]:
    """Each argument that was not read and is not known to change nothing."""
    arguments.read |= {"apply_layernorm_1p", "layernorm_zero_centered_gamma"}
    found = []
    for name, value in arguments.given.items():
        if name in arguments.read:
            continue
        if name in FORWARD:
            refused = value not in FORWARD[name]
        else:
            # An unknown argument that is off changes nothing.
            refused = name not in HARMLESS and value not in (None, False, "", 0, [], {}, ())
        found += [_shown(name, value)] if refused else []
    return found


def _fields(arguments: _Arguments, faults: list[str]) -> dict[str, Any]:
    fields = arguments.take(*SAME)
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    grouped = arguments.get("group_query_attention", False)
    groups = arguments.get("num_query_groups", heads)
    fields.setdefault("ffn_hidden_size", 4 * hidden)
    fields["group_query_attention"] = bool(grouped)
    fields["num_query_groups"] = groups if grouped else heads
    fields["kv_channels"] = arguments.get("kv_channels", hidden // heads)
    # older name first missing, then the default
    older = arguments.get("layernorm_epsilon", 1e-5)
    fields["norm_epsilon"] = arguments.get("norm_epsilon", older)
    fields["activation"] = _activation(arguments)
    if fields.get("add_bias_linear", True):  # Megatron-LM then sets add_qkv_bias, too
        fields.pop("add_qkv_bias", None)
    fields |= _window(arguments, faults)
    if fields.pop("multi_latent_attention", False):
        fields |= _latent(arguments, faults)
    else:
        fields |= _positions(arguments, faults)
    if fields.get("num_experts") == 0:
        del fields["num_experts"]
    if fields.get("num_experts"):
        fields |= _experts(arguments, faults)
    return _typed(fields)


def _typed(fields: dict[str, Any]) -> dict[str, Any]:
    """Whole numbers as floats where the field is one. Raises UserError for an object."""
    kinds = {field.name: field.type for field in dataclasses.fields(ModelConfig)}
    for name, value in fields.items():
        if isinstance(value, Record):
            raise _refusal([f"{flag_name(name)} is a {value.kind}"])
        if kinds[name].startswith("float"):
            fields[name] = float(value)
    return fields


def _activation(arguments: _Arguments) -> str:
    """One name for Megatron-LM's switches; its fused kernel of gelu is the tanh form.
    The core ignores --openai-gelu.
    """
    gated = arguments.get("swiglu", False)
    squared = arguments.get("squared_relu", False)
    fused = arguments.get("bias_gelu_fusion", False) and arguments.get("add_bias_linear", True)
    tanh = arguments.get("gelu_tanh", False) or fused
    if gated:
        return "swiglu"
    return "squared-relu" if squared else "gelu-tanh" if tanh else "gelu"


def _window(arguments: _Arguments, faults: list[str]) -> dict[str, Any]:
    """Megatron-LM's pair (W - 1, 0): W keys, the query's own among them."""
    window = arguments.get("window_size")
    skipped = arguments.get("window_attn_skip_freq")
    if window is None:
        return {}
    pair = tuple(window) if isinstance(window, (list, tuple)) else (None, None)
    if len(pair) != 2 or type(pair[0]) is not int or pair[0] < 0 or pair[1] != 0:
        faults.append(f"{_shown('window_size', window)} (only a pair of W - 1 and 0 is supported)")
        return {}
    return {"window_size": pair[0] + 1} | _of_layers("window_attn_skip_freq", skipped)


def _of_layers(name: str, pattern: Any) -> dict[str, str]:
    """A number or a list with 0 or 1 for each layer, as text; nothing where there is none."""
    if isinstance(pattern, (list, tuple)):
        pattern = [int(each) for each in pattern]
    return {} if pattern is None else {name: str(pattern).replace(" ", "")}


def _yarn(
    arguments: _Arguments, faults: list[str], *, prefix: str, original: int
) -> dict[str, Any]:
    """YaRN's values; with `prefix` those of common attention."""
    plain = arguments.get("rotary_scaling_factor", 1.0)
    factor = arguments.get(f"{prefix}rotary_scaling_factor", plain)
    length = arguments.get(f"{prefix}original_max_position_embeddings", original)
    fields = {
        "position_embedding_type": "yarn",
        "rope_scaling_factor": factor,
        "rope_original_max_position_embeddings": length,
        "yarn_beta_fast": arguments.get(f"{prefix}beta_fast", 32.0),
        "yarn_beta_slow": arguments.get(f"{prefix}beta_slow", 1.0),
    }
    for name, neutral in (("mscale", 1.0), ("mscale_all_dim", 0.0)):
        value = arguments.get(f"{prefix}{name}", arguments.get(name, neutral))
        if prefix and value != neutral and factor != 1:
            faults.append(f"{_shown(name, value)} (only latent attention takes it)")
        elif not prefix:
            fields[name] = value
    return fields


def _latent(arguments: _Arguments, faults: list[str]) -> dict[str, Any]:
    """Latent attention, which has rotary positions whatever the type of positions is."""
    kind = arguments.get("position_embedding_type", "learned_absolute")
    rope_type = arguments.get("rope_type", "yarn")
    arguments.read |= {"use_rope_scaling", "rope_scaling_factor"}  # ignored there
    arguments.read |= {"rotary_seq_len_interpolation_factor", "kv_channels"}
    if kind == "learned_absolute":
        faults.append("--multi-latent-attention with --position-embedding-type learned_absolute")
    if (skipped := arguments.get("no_rope_freq")) is not None:
        faults.append(f"--multi-latent-attention with {_shown('no_rope_freq', skipped)}")
    share = arguments.get("rotary_percent", 1.0)
    if rope_type == "rope" and share != 1:
        faults.append(f"--multi-latent-attention with {_shown('rotary_percent', share)}")
    fields = arguments.take(*LATENT)
    ours = ModelConfig()
    width = sum(fields.get(name, getattr(ours, name)) for name in LATENT[2:4])
    fields |= {
        "multi_latent_attention": True,
        "add_qkv_bias": False,
        "group_query_attention": False,
        "num_query_groups": arguments.get("num_attention_heads"),
        "kv_channels": width,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
    }
    yarn = _yarn(arguments, faults, prefix="", original=4096)
    factor = yarn["rope_scaling_factor"]
    if rope_type == "yarn" and factor != 1:
        return fields | yarn
    if yarn_scale(factor, yarn["mscale_all_dim"]) != 1:
        faults.append(
            f"--rope-type rope with {_shown('rotary_scaling_factor', factor)} and "
            f"{_shown('mscale_all_dim', yarn['mscale_all_dim'])}"
        )
    return fields


def _positions(arguments: _Arguments, faults: list[str]) -> dict[str, Any]:
    """Positions of common attention."""
    placed = arguments.get("add_position_embedding", True)
    rotary = arguments.get("use_rotary_position_embeddings", False)
    kind = arguments.get("position_embedding_type", "rope" if rotary else "learned_absolute")
    scaling = arguments.take(
        "rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor"
    )
    arguments.read |= {"rope_type", *LATENT}
    if kind not in ("learned_absolute", "rope", "yarn", "none"):
        faults.append(_shown("position_embedding_type", kind))
    if kind == "learned_absolute" and not placed:
        faults.append(_shown("add_position_embedding", placed))
    fields = {"position_embedding_type": kind}
    skipped = _of_layers("no_rope_freq", arguments.get("no_rope_freq"))
    if kind in ("rope", "yarn"):
        fields |= skipped
    if kind == "yarn":
        return fields | _yarn(arguments, faults, prefix="yarn_", original=4096)
    # YaRN's arguments do not act without it
    arguments.read |= {"yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim"}
    if kind != "rope":
        return fields
    if not scaling.get("use_rope_scaling"):
        scaling.pop("rope_scaling_factor", None)
    else:
        scaling.setdefault("rope_scaling_factor", 8.0)
        scaling["rope_original_max_position_embeddings"] = 8192
    return fields | scaling


def _experts(arguments: _Arguments, faults: list[str]) -> dict[str, Any]:
    fields = arguments.take(*EXPERTS)
    width = arguments.get("ffn_hidden_size", 4 * arguments.get("hidden_size"))
    fields.setdefault("moe_ffn_hidden_size", width)
    pattern = arguments.get("moe_layer_freq", 1)
    fields["moe_layer_freq"] = str(pattern).replace(" ", "")
    losses = arguments.get("moe_router_load_balancing_type", "aux_loss")
    coefficients = arguments.get("moe_aux_loss_coeff", 0.0)
    losses, coefficients = (
        tuple(value) if isinstance(value, (list, tuple)) else (value,)
        for value in (losses, coefficients)
    )
    if not BALANCING.issuperset(losses):
        faults.append(_shown("moe_router_load_balancing_type", losses))
    fields["moe_router_load_balancing_type"] = losses
    fields["moe_aux_loss_coeff"] = tuple(map(float, coefficients))
    return fields
