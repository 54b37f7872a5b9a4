"""Mistakes of layout, one at a time, which the comparison with the healthy one-process run must
find in the row of the table that is named for each. tests/mutants.py prints the table of all.
"""

from __future__ import annotations

from collections.abc import Callable

from mutation import Mutant, read_mutants
from parity.layouts import Row, read_row

TABLE = r"""
= megatron/model/layer.py TransformerLayer.__init__
no sum of layer norms | llama tp2 sp
    grad_sum=parallel.tp.sequence =>
        grad_sum=parallel.tp.sequence and not name.endswith("input_norm")
= megatron/model/mlp.py MLP.__init__
no sum of row-parallel biases | documents tp2 sp
    h, **whole_on_every_rank(tp) => h, copies="tp"
= megatron/model/attention/attention.py SelfAttention.make_projections
no sum of QK norms | mqa-qknorm-bias tp2 dp2
    grad_sum=True => grad_sum=False
= megatron/model/attention/attention.py fused_qkv
no sum of shared key/value heads | mqa-bias tp2
    "grad_sum": True => "grad_sum": False
= megatron/model/linear.py _RowLinear.forward
no sum of a row-parallel layer's outputs | gpt tp2
    y = all_reduce(gemm(x, weight), tp.axis) => y = gemm(x, weight)
= megatron/model/linear.py _ColumnLinear.backward
no sum of a column-parallel layer's input gradients | gpt tp2
    start(dx, tp.axis) => start(dx, tp.axis if tp.sequence else NO_TP.axis)
= megatron/model/linear.py _RowLinear.forward
a row-parallel bias added on every rank | gpt tp2
    y.add_(bias) => y.add_(bias * tp.size)
= megatron/model/linear.py _add_gradients
a column-parallel bias learnt on one rank alone | gpt tp2
    bias_grad.add_(own_dy => bias_grad.add_((ctx.tp.axis.rank == 0) * own_dy
= megatron/distributed/collectives.py gather_parts
the own rows of an overlapped GEMM in another order | documents tp2 sp
    yield slice(first, behind), x => yield slice(first, behind), x.flip(0)
= megatron/model/linear.py _RowLinear.forward
the halves of an overlapped sum in another order | documents tp2 sp
    for half in weight.chunk(2) => for half in weight.chunk(2)[::-1]
= megatron/distributed/collectives.py _add_in_rank_order
a reduce-scatter without some rank's part | gpt dp2 serial
    torch.add(parts[0], parts[1], out=out) => out.copy_(parts[axis.rank])
= megatron/model/linear.py accumulate_weight_grad
a weight's first GEMM added to what the last step left | gpt tp2
    overwrite = getattr(weight, "overwrite_main_grad", False) => overwrite = False
= megatron/model/embedding.py _Embedding.forward
overlapping vocabulary ranges of the embedding | gpt tp2
    rank * weight.shape[0] => rank * (weight.shape[0] - 1)
= megatron/model/loss.py _CrossEntropy.forward
shifted labels of the cross-entropy | gpt tp2
    labels.flatten() - sharded.first => labels.flatten() - sharded.first - sharded.tp.axis.rank
= megatron/model/loss.py ShardedCrossEntropy.combine
a maximum of logits not shared | gpt tp2
    (s_r * (m_r - m).exp_()).sum(0) => s_r.sum(0)
= megatron/model/loss.py sharded_cross_entropy
probability for padded vocabulary | padding tp2 sp
    count = min(max(vocab_size - first, 0), width) => count = width
= megatron/model/loss.py _LinearCrossEntropy.backward
a fused head whose ranks keep their part of dx | fused-head tp2 dp2
    else all_reduce(dx, tp.axis) => else dx
= megatron/model/loss.py _chunks
a fused head's chunks that leave tokens out | fused-head tp2 sp
    range(0, x.shape[0], step) => range(0, x.shape[0] - step, step)
= megatron/model/attention/attention.py CoreAttention.__init__
heads of every rank numbered from 0 in dropout | dropout tp2
    first_head = tp.axis.rank * heads => first_head = 0
= megatron/model/gpt.py GPTModel.micro_batch
positions of every rank counted from 0 in dropout | documents tp2 sp
    DropoutState(sample_ids, token_index[hidden_positions]) =>
        DropoutState(sample_ids, token_index[hidden_positions] - token_index[hidden_positions][0])
the first positions embedded on every rank | documents tp2 sp
    position_ids=position_ids[hidden_positions] =>
        position_ids=position_ids[: len(position_ids[hidden_positions])]
= megatron/model/spec.py ParameterSpec.boxes
key/value heads of another rank | gqa2-qknorm tp4 sp
    tp.axis.rank // sharing * extent => tp.axis.rank % tensor.shard.count(tp.size) * extent
= megatron/training/step.py read_micro_batch
samples of neighbouring data-parallel ranks overlap | gpt dp2 serial
    first + size * run.groups.dp.rank => first + run.groups.dp.rank
= megatron/parallel/zero.py Zero._finish_reduction
a data-parallel mean | gpt dp2 serial
    slice_ = pending.wait() => slice_ = pending.wait().div_(block.groups.shard.size)
= megatron/parallel/zero.py Zero.finish_gradients
one block not reduced | gpt dp2 serial
    for block in self.trained: => for block in self.trained[1:]:
= megatron/parallel/zero_plan.py _Walk._periods
reduced one micro-batch too early | documents tp2 dp2
    if often else count => if often else count - 1
= megatron/training/step.py all_reduce_totals
local instead of global token count | uneven tp2 dp2
    return dict(zip(own, totals.split([*map(len, own.values())]))) =>
        return dict(zip(own, totals.split([*map(len, own.values())]))) | {
        "valid_tokens": all_reduce(sums["valid_tokens"].clone(), run.groups.tp)
        * run.groups.dp.size}
= megatron/training/step.py update
scaled by the data-parallel size | gpt dp2 serial
    batch.nominal_tokens / (valid_tokens * =>
        batch.nominal_tokens / (run.groups.dp.size * valid_tokens *
= megatron/parallel/blocks.py Block.counted
replicated parameters counted on every rank in the norm | gpt tp2
    if holders(box, groups).rank > 0: => if False:
= megatron/optimizer/optimizer.py Optimizer.grad_sq_sum
the tied matrix counted twice in the norm | gpt tp2
    for block in self.trained: => for block in [*self.trained, self.trained[0]]:
= megatron/training/loop.py evaluate
evaluation of one rank's samples alone | gpt dp2 serial
    all_reduce(total, run.groups.world) => total
= megatron/training/step.py update
an overflow noticed by one rank alone | fp16 gpt tp2 sp
    grad_sq_sum=grad_sq_sum =>
        grad_sq_sum=grad_sq_sum.nan_to_num(1.0, 1.0, 1.0)
        if run.optimizer.grad_sq_sum().isfinite() else run.optimizer.grad_sq_sum()
= megatron/model/build.py build_model
a rank's virtual stages in the wrong order | dropout pp3 interleaved v2
    if rank == groups.pp.rank) => if rank == groups.pp.rank)[:: -1 if groups.pp.rank == 1 else 1]
= megatron/model/gpt.py GPTModel.__init__
layers numbered from 0 on every stage | dropout pp2 1f1b
    (config, seed, i, parallel) => (config, seed, i - stage.layers.start, parallel)
= megatron/model/layer.py TransformerLayer.__init__
the final norm in the layer before | m5 pp2 1f1b
    if record.last else => if index == config.num_layers - 2 else
= megatron/parallel/messages.py StageMessages.put
a gradient scaled on its way to the stage before | m5 pp2 1f1b
    (self.inbox if stays else self.outbox)[message] = x =>
        (self.inbox if stays else self.outbox)[message] = (
        x if message.kind is Kind.FORWARD else x / len(self.placement))
= megatron/distributed/collectives.py start_receive
a buffer for all messages, so that saved inputs go stale | m5 pp2 gpipe
    x = torch.empty(shape, dtype=dtype, device="cpu" if on_host else device) =>
        x = Copied.buffer = vars(Copied).get("buffer", torch.empty(shape, dtype=dtype))
= megatron/training/step.py read_micro_batch
samples of another micro-batch on every stage | m5 pp2 1f1b
    first + index * run.global_micro_batch_size =>
        first + (index + run.groups.pp.rank) % len(valid_tokens) * run.global_micro_batch_size
= megatron/parallel/pipeline.py Pipeline.backward
weight gradients of another micro-batch | m5 pp2 zero-bubble
    dy, saved = step.input_of(action), step.saved.pop((stage, micro)) =>
        dy, saved = step.input_of(action), step.saved.pop((stage, micro))
        if action.kind is Kind.BACKWARD_WEIGHT: saved = deque([*kept] for kept in next(
        each for each in (*step.saved.values(), saved) if isinstance(each[-1], list)))
no embedding gradient in the split backward | m5 pp2 zero-bubble
    dy, deferred = self.runner.backward( =>
        dy, deferred = (saved.pop(), None) if (
        action.kind is Kind.BACKWARD_INPUT and not layer.reads_weight_backward
        ) else self.runner.backward(
= megatron/parallel/layer_runner.py LayerRunner.backward
no dropout in the second run of recomputation | recompute pp2 zero-bubble
    saved = self.recompute_forward(layer, saved)[1] =>
        from dataclasses import replace
        saved = self.recompute_forward(layer, saved._replace(micro_batch=replace(
        saved.micro_batch, dropout=None, hidden_dropout=None)))[1]
= megatron/parallel/zero_plan.py _Walk.after
reduced when the input gradients are complete | documents pp2 zero-bubble-v dp2
    if kind in COMPLETING: => if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
= megatron/parallel/zero.py Zero.finish_gradients
partial gradients summed on the first pipeline rank alone | llama pp2 1f1b tp2 sp
    sum_partial_gradients(self.trained, self.groups) =>
        self.groups.pp.rank or sum_partial_gradients(self.trained, self.groups)
= megatron/parallel/zero.py sum_partial_gradients
no sum of a tied matrix's gradients | gpt pp2 gpipe
    , ("tied", groups.tied) =>
= megatron/distributed/groups.py build_groups
a tied matrix summed over data-parallel ranks | documents pp2 1f1b dp2
    _ends(groups["pp"], own) => groups["dp"]
= megatron/training/step.py update
a norm of each stage | m5 pp2 1f1b
    grad_sq_sum=grad_sq_sum => grad_sq_sum=run.optimizer.grad_sq_sum()
= megatron/training/run.py Run.reports_loss
losses and tokens counted on every stage | m5 pp2 1f1b
    self.pipeline.has_head and =>
= megatron/parallel/zero.py Zero._finish_reduction
one block's gradients not added to the shard | dropout dp2 zero2
    block.summed.add_(slice_) =>
        block.summed.add_(slice_ if block is not self.blocks[1] else 0)
= megatron/parallel/blocks.py Block.__init__
the slice of another rank updated | dropout dp2 zero3
    _equal_part((0, self.size), groups.shard) =>
        _equal_part((0, self.size), replace(groups.shard, rank=1 - groups.shard.rank))
= megatron/parallel/zero.py Zero._start_reduction
a sum in the place of another rank's slice | dropout dp2 zero1
    slice(*block.shard_range) =>
        slice(block.size - block.shard_range[1], block.size - block.shard_range[0])
= megatron/parallel/zero.py Zero.wait_for_block
gathered weights not awaited | sgd dp2 serial zero3
    self.gathering.pop(block).wait() => self.gathering.pop(block)
= megatron/parallel/zero.py Zero.gather
a block freed before its pass | dropout dp2 zero3
    self.wait_for_block(block) => self.wait_for_block(block), block.release()
= megatron/parallel/zero_plan.py _Walk._is_needed
kept weights never freed, so that they go stale | dropout dp2 zero3 kept
    return self.remaining[blocks] > 0 => return True
= megatron/parallel/zero_plan.py ZeroPlanner.reads_gathered
weights gathered for forward passes alone | dropout dp2 zero3
    or (kind is not => or (False and kind is not
= megatron/parallel/zero.py Zero.start_gathers
the own slice gathered as it was left | dropout dp2 zero3
    own.copy_(block.gathered_from, non_blocking=True) => own.zero_()
= megatron/parallel/blocks.py Block.drop
the shards' gradients kept from step to step | dropout dp2 zero2
    self.grad = self.summed = None => self.grad = None
= megatron/parallel/blocks.py Block.open
a gradient buffer that does not begin with zeros | dropout dp2 zero2
    self.grad[first:last].zero_() => self.grad[first:last].fill_(1)
= megatron/parallel/blocks.py Block.add_early
gradients that are complete early dropped | documents pp2 zero-bubble dp2 zero2
    self.grad[self.layout.gemm_numel :].copy_(self.early.pop(key)) => self.early.pop(key)
= megatron/parallel/zero_plan.py _Walk._periods
a resident buffer reduced in every micro-batch | dropout dp2 zero1
    often = self.zero_stage >= 2 and => often = self.zero_stage >= 1 and
a tied matrix whose last passes are not reduced | gpt pp2 zero-bubble-v dp2 zero2
    if often else count => if often else count - 1
= megatron/parallel/zero.py sum_partial_gradients
a tied matrix's ends not summed | recompute pp2 1f1b dp2 zero3
    , ("tied", groups.tied) =>
= megatron/parallel/zero.py sum_copies
no sum over the copies of a slice | gqa2-qknorm dp4 shard2 zero2
    if block.groups.same_shard.size > 1: => if False:
= megatron/parallel/blocks.py Block.__init__
every copy of a slice counted in the norm | gqa2-qknorm dp4 shard2 zero1
    _equal_part(self.shard_range, groups.same_shard) => self.shard_range
= megatron/parallel/zero.py Zero.all_gather_weights
one block's weights not sent round | dropout dp2 zero1
    assert block not in self.gathering => if block is self.blocks[1]: return
= megatron/parallel/blocks.py Block.segments
weight decay counted from a shard's beginning | dropout dp2 zero2
    in self.layout.ranges: => in ((first + stop, each) for stop, each in self.layout.ranges):
= megatron/parallel/blocks.py Block.runs
partial gradients summed at a shard's beginning | mqa-qknorm-bias tp2 sp dp2 zero2
    yield buffer[low - self.own[0] : high - self.own[0]] => yield buffer[: high - low]
= megatron/parallel/blocks.py _rectangles
rows of a cut tensor misnamed | dropout dp2 zero1
    offset = box.offset[0] + row + first, => offset = box.offset[0] + row,
= megatron/parallel/zero.py Zero._start_reduction
a narrow reduction that is none | wire gpt dp2 zero2
    out, self.reduce_dtype, => out, None,
= megatron/training/step.py share_positions
positions that count from 0 on each rank | llama cp2 p2p
    getattr(batch, name)[:, own] =>
        getattr(batch, name)[:, torch.arange(len(own)) if name == "position_ids" else own]
labels that are the next tokens of what the rank holds | gpt cp2 p2p
    getattr(batch, name)[:, own] =>
        batch.tokens[:, own].roll(-1, 1) if name == "labels" else getattr(batch, name)[:, own]
= megatron/training/step.py run_micro_batches
an objective multiplied by the context-parallel ranks | gpt cp2 p2p
    scale, recording => scale * run.groups.cp.size, recording
= megatron/model/attention/context_parallel.py Places.of
sequences in the order in which ranks hold them | dropout cp2 allgather
    order.argsort()) => torch.arange(len(order)))
= megatron/model/attention/context_parallel.py _to_sequence
exchanged parts of the sequence in the wrong order | dropout cp2 a2a
    all_to_all(x.movedim(2, 0).contiguous(), axis) =>
        all_to_all(x.movedim(2, 0).contiguous(), axis).flip(0)
= megatron/model/attention/context_parallel.py heads_for_sequence
key/value heads repeated in turn, not each for its queries | gqa2-qknorm cp4 a2a
    x.repeat_interleave(size // x.shape[2], 2) => x.repeat(1, 1, size // x.shape[2], 1)
= megatron/model/attention/ring_attention.py GatheredAttention.backward
gradients of keys and values that the own queries gave alone | gpt cp4 allgather
    reduce_scatter(gradient.flatten(0, 1), axis) =>
        gradient.flatten(0, 1).chunk(axis.size)[axis.rank]
= megatron/model/attention/attention.py seen_by_queries
a mask as if the rank's queries were the first | dropout cp2 allgather
    "q_positions": own, => "q_positions": torch.arange(len(own)),
= megatron/model/attention/ring_attention.py RingAttention.backward
lost hop of gradients | gpt cp2 p2p
    own_gradient += arriving.wait() => arriving.wait()
= megatron/model/attention/ring_attention.py _around_ring
keys go round the ring and values stay | gpt cp2 p2p
    held = coming.wait() => held = torch.stack((coming.wait()[0], held[1]))
= megatron/model/attention/ring_attention.py ring_steps
the second half of an earlier rank's keys | gpt cp2 p2p
    whole, keys=first => whole, keys=second
= megatron/model/attention/ring_attention.py _join
a log-sum-exp rounded to bf16 | gpt cp2 p2p
    sigmoid(part_lse - lse) => sigmoid(part_lse.bfloat16().to(lse) - lse)
= megatron/model/attention/ring_attention.py BlockAttention.backward
a backward pass that normalizes each block by itself | gpt cp2 p2p
    dout, q, k, v, out = _by_head => lse = self.forward(q, k, v, mask=mask)[1]
        dout, q, k, v, out = _by_head
= kernels/attention.py _kept
keys of each block counted from 0 in dropout | dropout cp2 p2p
    drop, mask.k_positions => drop
= megatron/model/experts/experts.py _ExpertLinear.backward
gradients of experts divided by the ranks that hold them | moe dp4 ep2
    accumulate_weight_grad(dy, => accumulate_weight_grad(dy / 2,
= megatron/parallel/blocks.py Block.counted
a norm of the gradient without experts | moe dp2 ep2
    if low < high: => if low < high and self.layout.group != "expert":
a norm of the gradient that counts an expert on each rank | moe dp4 ep2
    low, high = max(first, self.share[0], lowest), min(stop, self.share[1], highest) =>
        own = self.own if self.layout.group == "expert" else self.share
        low, high = max(first, own[0], lowest), min(stop, own[1], highest)
= megatron/model/experts/router.py Router._loads
auxiliary losses by the tokens of the rank alone | moe cp2 ep2
    all_reduce(count_of(keys, samples * count), self.samples) => count_of(keys, samples * count)
= megatron/model/experts/router.py Router.losses
auxiliary losses that grow with the ranks that share a sample | moe cp2 ep2
    (load.to(sums.dtype) * sums).sum() => (load.to(sums.dtype) * sums).sum() * self.samples.size
= megatron/model/experts/router.py Router.weights
experts weighted by scores with the bias | moe-bias dp2 ep2
    scores.gather(1, experts) => (scores + self.expert_bias).gather(1, experts)
= megatron/model/gpt.py GPTModel.update_routers
the expert bias changes in a skipped step | fp16 moe-bias dp2 ep2
    1 - skipped => 1 - skipped * 0
= megatron/model/spec.py TensorSpec.is_held
a rank holds other experts than those whose tokens come | moe dp2 ep2
    == rank => == (rank + 1) % ranks
= megatron/model/experts/dispatch.py _take_weights
weights in the order of tokens, not of rows | moe dp2 ep2
    weights.flatten().index_select(0, assignments.order) =>
        weights.flatten()[: len(assignments.order)].clone()
= megatron/model/experts/dispatch.py _summed
the outputs of one of the ranks that share an expert | moe tp2 sp
    .sum(0, dtype=wide) => [spread.axis.rank]
= megatron/model/experts/router.py Router.__init__
a router's gradient of the own tokens under sequence parallelism | moe-bias tp2 sp etp1
    **whole_on_every_rank(parallel.tp) => copies="tp"
= megatron/model/experts/router.py Router._within_capacity
an expert's capacity of the rank's own tokens | moe-capacity cp2 ep2
    len(every) / count * factor => len(experts) * k / count * factor
= megatron/model/experts/dispatch.py transposed_order
received rows taken for sorted ones | moe dp2 ep2
    return expert.argsort(stable=True) => return torch.arange(total)
= megatron/model/attention/latent_attention.py _of_all_heads
the gradient of position channels of the own heads alone | mla tp2
    all_reduce(dy.clone(), tp.axis) => dy.clone()
= megatron/model/attention/latent_attention.py LatentAttention._down
down-projections that declare whole gradients under sequence parallelism | mla tp2 sp
    **whole_on_every_rank(self.tp) => copies="tp"
= megatron/model/attention/attention.py CoreAttention.__init__
scores scaled without YaRN's factor on several ranks | mla tp2 sp
    "scale": config.softmax_scale =>
        "scale": config.softmax_scale if tp.size == 1 else config.kv_channels**-0.5
= megatron/model/attention/latent_attention.py _Heads.forward
each head reads the values of the next one | mla tp2 sp
    torch.cat((value, zeros), dim=-1) => torch.cat((value.roll(-1, 2), zeros), dim=-1)
= megatron/model/layer.py TransformerLayer.__init__
windows of the layer before on the last rank | layer-kinds pp2 1f1b
    index(record.window) => index(layer_records(config)[index - 1].window)
no-rope-freq ignored | layer-kinds pp2 1f1b
    self.rotates = record.rotary => self.rotates = True
= megatron/model/fp8.py Fp8Gemms._quantise
tensors scaled by the maxima of the rank's own part | fp8-tensors tp2 sp
    all_reduce_max(torch.cat(parts), axis) => torch.cat(parts)
= megatron/model/layer.py vocabulary_matrix
a tied head on the last stage at the base rate | decoupled pp2 1f1b
    decoupled_lr=True => decoupled_lr=not head
= megatron/model/mlp.py TiledMLP.forward
the first piece of the sequence twice | tiled tp2 sp
    _PutPiece.apply(y, super().forward(piece), rows) =>
        _PutPiece.apply(y, super().forward(x[:length] if start == length else piece), rows)
= megatron/model/mlp.py _TakePiece.backward
an input gradient of the last piece alone | tiled tp2 sp
    dx = drows.new_empty(ctx.shape) if dx is None else dx => dx = drows.new_zeros(ctx.shape)
"""

MUTANTS = read_mutants(TABLE)


def row_of(mutant: Mutant) -> Row:
    """The row that must find it."""
    return read_row(mutant.where)


def caught_by(mutant: Mutant, worlds: Callable) -> tuple[str, str] | None:
    """(row, first fault) when its row notices it; None when the mutant survives."""
    from distributed.pool import Hang, RankError
    from parity.compare import faults_in

    row = row_of(mutant)
    try:
        faults = faults_in(worlds, row, mutant)
    except (Hang, RankError) as error:
        faults = [str(error).strip().splitlines()[-1]]
    return (str(row), faults[0]) if faults else None
