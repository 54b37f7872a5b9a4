"""megatron-core's GPTModel, DistributedDataParallel, optimizer and schedule over Gloo. Run by
benchmarks/training.py.

Without TransformerEngine and apex, so with megatron-core's local layers: unfused attention, norms
of torch; its torch.compile fusions are off as on every side. Shims, for megatron-core assumes CUDA
(cpu_shims): the current device is the CPU, "cuda" in tensor factories means it, and CPU tensor
types are called CUDA's; forking CUDA's random state does nothing; Gloo has no coalescing of
collectives, so one after the other is sent, in order; torch's AdamW is the fused one (asked for by
megatron-core in apex alone). With experts: CUDA streams and events have nothing to wait for; a name
that the router looks for is defined with TransformerEngine alone; numbers of rows, which Megatron
hands to collectives as arrays if they come from a GPU, are arrays here too. Experts are
SequentialMLP, since GroupedMLP needs a package of CUDA kernels and TEGroupedMLP TransformerEngine,
and rows are sent by the alltoall dispatcher. With sequence parallelism torch's RMSNorm carries the
mark by which its gradient is summed, which megatron-core's wrapper refuses to set. Pipelines need
no shim: outputs are freed when sent, as in Megatron-LM, and there is no CUDA stream to wait for
after a batch of messages (batch_p2p_sync); both are settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from common import StepClock, Work, parse_work, rank_samples, report, tensor_of


def on_cpu(factory):
    """A tensor factory for which device "cuda" is the CPU."""
    return lambda *args, **settings: factory(
        *args, **settings | ({"device": "cpu"} if settings.get("device") == "cuda" else {})
    )


class Stream:
    """Replaces a CUDA stream and its events: there is nothing to wait for."""

    def wait_stream(self, stream: Stream) -> None:
        pass

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        pass


class InOrder:
    """Replaces torch's coalescing manager: waits for the collectives sent inside it."""

    def __init__(self):
        self.works = []

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@contextmanager
def send_in_order(group, async_ops: bool = False) -> Iterator[InOrder]:
    manager, all_reduce = InOrder(), dist.all_reduce

    def send(*args, **settings):
        work = all_reduce(*args, **settings)
        if async_ops:
            manager.works.append(work)

    dist.all_reduce = send
    try:
        yield manager
    finally:
        dist.all_reduce = all_reduce


def cpu_shims() -> None:
    """Before megatron.core is imported."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    for name in ("zeros", "ones", "tensor", "empty"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    original = torch.Tensor.type
    torch.Tensor.type = lambda self, *args, **settings: (
        original(self, *args, **settings)
        if args or settings
        else original(self).replace("torch.", "torch.cuda.")
    )
    dist._coalescing_manager = send_in_order
    stream = Stream()
    torch.cuda.Stream = torch.cuda.current_stream = lambda: stream
    torch.cuda.stream = lambda _: nullcontext()
    torch.optim.AdamW = partial(torch.optim.AdamW, fused=True)


cpu_shims()

import megatron.core
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

tensor_parallel.random.CudaRNGStatesTracker.fork = lambda *_: nullcontext()
moe_utils.te_general_gemm = None  # which it asks for, and names with TransformerEngine alone


def on_host(counts: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Numbers of rows as the dispatcher's copies from a GPU come: arrays where it asks for them."""
    return counts.numpy() if as_numpy and torch.is_tensor(counts) else counts


token_dispatcher.maybe_move_tensor_to_cpu = on_host


class MarkedNorm(torch.nn.RMSNorm):
    """torch's RMSNorm for a part of the sequence: the gradient of its weight is summed over the
    tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


def experts(work: Work) -> dict[str, object]:
    """Settings of TransformerConfig; the router's softmax is that of the chosen logits."""
    if not work.experts:
        return {}
    return {
        "num_moe_experts": work.experts,
        "moe_router_topk": work.topk,
        "moe_ffn_hidden_size": work.expert_ffn,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": work.expert_parallel,
    }


def build(work: Work) -> GPTModel:
    """The bare model of this rank."""
    bf16, pipeline = work.precision == "bf16", work.pipeline_parallel > 1
    config = TransformerConfig(
        num_layers=work.layers,
        hidden_size=work.hidden,
        num_attention_heads=work.heads,
        num_query_groups=work.key_heads,
        ffn_hidden_size=work.ffn,
        **experts(work),
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=work.tensor_parallel,
        sequence_parallel=bool(work.sequence_parallel),
        pipeline_model_parallel_size=work.pipeline_parallel,
        num_layers_in_first_pipeline_stage=work.first_stage_layers if pipeline else None,
        deallocate_pipeline_outputs=pipeline,
        batch_p2p_sync=False,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
    layer = get_gpt_layer_local_spec(work.experts or None, normalization="RMSNorm")
    if work.sequence_parallel:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = MarkedNorm
        layer = TransformerBlockSubmodules(layer_specs=[layer] * work.layers, layer_norm=MarkedNorm)
    return GPTModel(
        config,
        layer,
        work.vocab,
        work.seq,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


@torch.no_grad()
def load(model: GPTModel, start: Mapping[str, np.ndarray], work: Work, rank: int) -> None:
    """Take this tensor-parallel rank's part of the initial weights of this stage; those of the
    norms are ones already.
    """

    def part(name: str, dim: int) -> torch.Tensor:
        return tensor_of(start, name).chunk(work.tensor_parallel, dim)[rank]

    def load_mlp(mlp: torch.nn.Module, name: str) -> None:
        gate_up = (part(f"{name}.gate.weight", 0), part(f"{name}.up.weight", 0))
        mlp.linear_fc1.weight.copy_(torch.cat(gate_up))
        mlp.linear_fc2.weight.copy_(part(f"{name}.down.weight", 1))

    if model.pre_process:
        model.embedding.word_embeddings.weight.copy_(part("embedding.word.weight", 0))
    if model.post_process:
        model.output_layer.weight.copy_(part("head.weight", 0))
    for layer in model.decoder.layers:
        i = layer.layer_number - 1
        attention, mlp = f"layers.{i}.attention", f"layers.{i}.mlp"
        groups = work.key_heads // work.tensor_parallel
        heads = [
            part(f"{attention}.{name}.weight", 0).view(groups, -1, work.hidden) for name in "qkv"
        ]
        layer.self_attention.linear_qkv.weight.copy_(torch.cat(heads, 1).flatten(0, 1))
        layer.self_attention.linear_proj.weight.copy_(part(f"{attention}.proj.weight", 1))
        if not work.experts:
            load_mlp(layer.mlp, mlp)
            continue
        layer.mlp.router.weight.copy_(part(f"{mlp}.router.weight", 0))
        for expert, module in zip(
            layer.mlp.local_expert_indices, layer.mlp.experts.local_experts, strict=True
        ):
            load_mlp(module, f"{mlp}.experts.{expert}")


def forward_step(batches: Iterator[torch.Tensor], model):
    batch = next(batches)
    positions = torch.arange(batch.shape[1] - 1).expand(len(batch), -1)
    losses = model(batch[:, :-1], positions, None, labels=batch[:, 1:].contiguous())
    # the schedule divides the mean in place
    return losses, lambda output: (
        (mean := output.float().mean()),
        {"lm loss": mean.detach().clone()},
    )


class Training:
    """The run of this rank: `step` takes one step and returns its mean loss."""

    def __init__(self, work: Work, start: Mapping[str, np.ndarray]):
        self.work, self.tokens = work, tensor_of(start, "tokens")
        parallel_state.initialize_model_parallel(
            work.tensor_parallel,
            work.pipeline_parallel,
            expert_model_parallel_size=work.expert_parallel,
        )
        self.data_rank = parallel_state.get_data_parallel_rank()
        bare = build(work)
        load(bare, start, work, parallel_state.get_tensor_model_parallel_rank())
        self.parameters = count_parameters(bare, work)
        config, bf16 = bare.config, work.precision == "bf16"
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
        self.model = DistributedDataParallel(
            config, ddp, Float16Module(config, bare) if bf16 else bare
        )
        settings = OptimizerConfig(
            optimizer="adam",
            lr=work.lr,
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=1e-8,
            bf16=bf16,
            params_dtype=config.params_dtype,
            clip_grad=1.0,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = self.model.no_sync
        config.grad_scale_func = self.optimizer.scale_loss
        self.schedule = get_forward_backward_func()

    def step(self, step: int) -> float:
        """Step 0, 1, ...; 0 without the head."""
        work = self.work
        for group in self.optimizer.param_groups:
            # the work of Megatron's own scheduler
            group["lr"], group["weight_decay"] = work.learning_rate(step), 0.1 * group["wd_mult"]
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = self.schedule(
            forward_step_func=forward_step,
            data_iterator=iter(rank_samples(self.tokens, step, work, self.data_rank)),
            model=[self.model],
            num_microbatches=work.accumulation,
            seq_length=work.seq,
            micro_batch_size=work.micro_batch,
        )
        self.optimizer.step()
        return sum(part["lm loss"].item() for part in parts) / work.accumulation


def count_parameters(model: GPTModel, work: Work) -> int:
    """Of the whole model."""
    parameters = torch.tensor(
        sum(
            # False: an expert, of which other ranks hold others
            p.numel() * (1 if getattr(p, "allreduce", True) else work.expert_parallel)
            for p in model.parameters()
            if tensor_parallel.param_is_not_tensor_parallel_duplicate(p)
        )
    )
    dist.all_reduce(parameters, group=parallel_state.get_model_parallel_group())
    return int(parameters)


def main() -> None:
    work, start = parse_work()
    torch.set_num_threads(work.threads)
    if work.processes > 1:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    training = Training(work, start)
    # experts that other ranks do not hold have an optimizer of their own
    clock = StepClock(len(training.optimizer.chained_optimizers))
    losses = [training.step(step) for step in range(work.steps)]
    report(work, clock, losses, training.parameters, {"megatron-core": megatron.core.__version__})


if __name__ == "__main__":
    main()
