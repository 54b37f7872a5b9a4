"""Changes of meaning, one function at a time: each makes the program train something else than its
flags ask for, and each must be found.

`where` names the case of cases.py in which the oracle must notice it, or the file of tests in which
one must fail. tests/parity/mutants.py has the mutants of layout: sums over ranks, orders of
messages, shards.
"""

from __future__ import annotations

from mutation import read_mutants

MODEL = r"""
= megatron/model/norm.py AddNorm.forward
a LayerNorm's variance over n - 1 | gpt-files
    self.function.apply(stream, self.weight, self.bias, self.eps), stream =>
        self.function.apply(stream, self.weight, self.bias, self.eps) * (
        1 - 1 / x.shape[-1]) ** 0.5, stream
an RMSNorm that takes the mean off | llama
    self.function.apply(stream, => self.function.apply(stream - stream.mean(-1, keepdim=True),
a residual stream that is taken behind the norm | llama
    self.function.apply(stream, self.weight, self.bias, self.eps), stream =>
        (self.function.apply(stream, self.weight, self.bias, self.eps),) * 2
= megatron/model/norm.py Norm.__init__
a norm's epsilon ten times as large | gpt-files
    config.norm_epsilon => config.norm_epsilon * 10
= megatron/model/norm.py _LayerNorm.backward
norms' biases not trained | gpt-files
    (dweight, dbias), dx => (dweight, dbias * 0), dx
= megatron/model/layer.py TransformerLayer.__init__
no final norm | llama
    self.recompute_context = => if record.last: self.final_norm.forward = lambda y, x: (x + y,) * 2
        self.recompute_context =
= megatron/model/mlp.py activation_function
the exact GELU for its tanh form and the other way round | gpt-files
    FUNCTIONS[kind] => FUNCTIONS[{"gelu": "gelu-tanh", "gelu-tanh": "gelu"}.get(kind, kind)]
= megatron/model/mlp.py _Gated.forward
gate and up exchanged | llama
    gate, up = => up, gate =
GEGLU by the tanh form | mixed-2
    value(gate, out=gate.new_empty(gate.shape)) => F.gelu(gate, approximate="tanh")
= megatron/model/mlp.py gated_gradients
the gradient of SiLU without its second term | llama
    gradient(torch.mul(dy, up, out=dgate), gate, grad_input=dgate) =>
        torch.mul(dy * gate.sigmoid(), up, out=dgate)
= megatron/model/mlp.py _SquaredReLU.forward
a squared ReLU that is not squared | mixed-5
    F.relu(x).square_() => F.relu(x)
= megatron/model/gpt.py GPTModel.micro_batch
learned positions count from 1 | gpt-files
    position_ids=position_ids[hidden_positions] =>
        position_ids=(position_ids[hidden_positions] + 1) % tokens.shape[0]
= megatron/model/attention/rotary.py _rotate
rotary pairs of neighbours instead of halves | llama
    width = cos.shape[-1] => width = cos.shape[-1]
        order = torch.arange(width).view(-1, 2).t().flatten()
        x = x[..., order]
    return y if turning => return y[..., order.argsort()] if turning
rotary positions turn the other way | llama
    value=direction => value=-direction
= megatron/model/attention/rotary.py RotaryOfProjection.forward
keys are not rotated | llama
    k = _rotate(qkv[:, :, :, -2], cos, sin, 1) => k = qkv[:, :, :, -2]
= megatron/model/attention/rotary.py RotaryTables.table
rotary positions count on through documents | mixed-0
    angle = => positions = torch.arange(len(positions))[:, None].expand(positions.shape)
        angle =
= megatron/model/attention/rotary.py inverse_frequencies
rotary_base ignored | mixed-13
    config.rotary_base ** => 10000.0 **
rotary_seq_len_interpolation_factor ignored | mixed-2
    if config.rotary_seq_len_interpolation_factor => if False
rope_low_freq_factor ignored | uneven-split-seed-llama3
    rotating = => import dataclasses; config = dataclasses.replace(config, rope_low_freq_factor=1.0)
        rotating =
yarn_beta_fast ignored | yarn-ramp
    rotating = => import dataclasses; config = dataclasses.replace(config, yarn_beta_fast=32.0)
        rotating =
YaRN without its temperature | mixed-5
    / factor, temperature => / factor, 1.0
= megatron/model/attention/attention.py fused_attention
scores divided by d instead of its root | llama
    scale=scale, => scale=scale**2,
query heads spread over key heads the other way | llama-gqa-qknorm-window
    q, k, v = (x.permute( =>
        order = torch.arange(q.shape[2]).view(-1, k.shape[2]).t().flatten()
        q, k, v = (x.permute(
    out = F.scaled_dot_product_attention( =>
        q = q[:, order]
        out = F.scaled_dot_product_attention(
    return out.permute(2, 0, 1, 3) => return out[:, order.argsort()].permute(2, 0, 1, 3)
queries see the key that follows | llama
    q, k, v = (x.permute( => late = torch.arange(len(q), dtype=torch.int32) + 1
        import dataclasses; mask = dataclasses.replace(mask, q_positions=late)
        q, k, v = (x.permute(
= megatron/model/attention/attention.py CoreAttention.__init__
the cap of scores ignored | caps-zloss
    "softcap": config.attn_logit_softcapping => "softcap": None
scores not divided by their cap | caps-zloss
    "scale": config.softmax_scale =>
        "scale": config.softmax_scale * (config.attn_logit_softcapping or 1.0)
= megatron/model/attention/attention.py SelfAttention.project
keys normed by the queries' weight | llama-gqa-qknorm-window
    self.q_norm(q), self.k_norm(k) => self.q_norm(q), self.q_norm(k)
queries and keys normed after their rotation | llama-gqa-qknorm-window
    self.q_norm(q), self.k_norm(k) => q, k
    return q, k, v => return self.q_norm(q), self.k_norm(k), v
= megatron/model/attention/attention.py seen_by_queries
a window of one key more | llama-gqa-qknorm-window
    "window": window, => "window": window and window + 1,
the document mask ignored | documents
    "document_starts": document_starts => "document_starts": None
= megatron/data/loader.py Source.batch
an end of document that belongs to the next one | documents
    starts.astype(np.int32) => np.maximum.accumulate(
        np.where(tokens == self.eod, np.arange(tokens.shape[1]), 0), axis=1).astype(np.int32)
= kernels/attention.py attention_reference
weights that dropout keeps not scaled up | gpt-dropout
    * (1 / (1 - options.drop)) =>
= kernels/attention.py _kept
one dropout mask for all heads | gpt-dropout
    samples, heads, at, => samples, heads * 0, at,
= megatron/model/dropout.py Dropout.__init__
one dropout mask for all layers | gpt-dropout
    philox.key(seed, *names) =>
        philox.key(seed, *(0 if isinstance(name, int) else name for name in names))
dropout that does not heed the seed | gpt-dropout
    philox.key(seed, => philox.key(0,
= megatron/model/layer.py TransformerLayer.__init__
one dropout mask for attention's and the MLP's output | gpt-dropout
    "attention.output_dropout" => "mlp.output_dropout"
= megatron/model/dropout.py _MaskedDropout.forward
hidden states that dropout keeps not scaled up | gpt-dropout
    return x * keep.to(x.dtype) * ctx.factor => return x * keep.to(x.dtype)
= megatron/model/dropout.py Dropout.add
the residual dropped too | gpt-dropout
    return residual + self.hidden(x, state) => return self.hidden(x + residual, state)
= kernels/philox.py keep_mask
what should be dropped is kept | gpt-dropout
    round(drop * 2**32) => round((1 - drop) * 2**32)
= kernels/philox.py lowest_kept
what should be dropped of hidden states is kept | gpt-dropout
    round(drop * 2**16) => round((1 - drop) * 2**16)
= megatron/model/experts/router.py Router._jitter
one jitter for all samples | moe-bias-groups
    state.counters() => [state.counters()[0] * 0, state.counters()[1]]
a jitter off centre | moe-bias-groups
    noise.mul_(2 * eps).add_(1 - eps) => noise.mul_(2 * eps).add_(1)
= megatron/model/experts/router.py Router.losses
a router's z-loss of scores | moe-sqrtsoftplus
    logits.logsumexp(-1) => scores.logsumexp(-1)
= megatron/model/experts/moe.py MoE.forward
experts that read the jittered input | moe-bias-groups
    logits, scores = self.router.scores(x, state) =>
        x = x if state is None else x * self.router._jitter(x, state)
        logits, scores = self.router.scores(x, None)
= megatron/model/gpt.py GPTModel.micro_batch
one dropout mask for all samples | gpt-dropout
    held = => sample_ids = sample_ids * 0
        held =
dropout in evaluation | gpt-dropout
    held = => training = True
        held =
= megatron/model/linear.py _Linear.backward
biases not trained | gpt-files
    sum(0, dtype=bias.main_grad.dtype) => sum(0, dtype=bias.main_grad.dtype) * 0
= megatron/model/embedding.py accumulate_embedding_grad
a token that comes twice counts once in the embedding's gradient | llama
    ids, dy = ids.flatten(), dy.flatten(0, -2) => ids, dy = ids.flatten(), dy.flatten(0, -2)
        first = [ids.tolist().index(each) for each in ids.unique().tolist()]
        ids, dy = ids[first], dy[first]
= megatron/model/spec.py normal
residual outputs scaled by the root of L, not of 2 L | gpt-files
    2 * config.num_layers => config.num_layers
init-method-std ignored | llama
    config.init_method_std => 0.02
= megatron/model/init.py fill_initial
the seed of initial weights ignored | uneven-split-seed-llama3
    philox.key(seed, => philox.key(1234,
= megatron/model/loss.py _CrossEntropy.forward
the cap of logits ignored | caps-zloss
    own = => sharded = __import__("dataclasses").replace(sharded, softcap=None)
        own =
padded vocabulary takes probability | llama
    own = => sharded = __import__("dataclasses").replace(sharded, count=logits.shape[-1])
        own =
= megatron/model/loss.py ShardedCrossEntropy.into_gradient
the gradient without the derivative of the cap of logits | caps-zloss
    if self.softcap is not None => if False
= megatron/model/layer.py HeadLayer.forward
z-loss without its factor of two in the gradient | caps-zloss
    self.config.z_loss_coeff * => self.config.z_loss_coeff / 2 *
z-loss in the reported loss | caps-zloss
    [objective, reported] => [objective, objective.detach()]
the loss mask ignored in the gradient | documents
    (loss * mask).sum() => loss.sum()
the loss mask ignored in the reported loss | documents
    (loss.detach() * mask).sum() => loss.detach().sum()
gradients of means of micro-batches | documents
    (loss * mask).sum() => (loss * mask).sum() * mask.numel() / mask.sum()
= megatron/optimizer/optimizer.py Optimizer.step
gradients divided by all tokens, masked ones too | documents
    norm = => grad_scale = grad_scale * 0 + 1.0
        norm =
"""

DATA = r"""
= megatron/data/loader.py Source.batch
end-of-document tokens not masked | documents
    if config.eod_mask_loss else => if False else
positions reset one token late | documents
    positions - starts => positions - np.concatenate((starts[:, :1], starts[:, :-1]), axis=1)
the loss masked where the label is an end of document | documents
    mask = tokens != self.eod => mask = labels != self.eod
labels not shifted | llama
    "labels": labels => "labels": tokens
= megatron/data/token_stream.py TokenStream.places
samples at multiples of the sequence length | llama
    * self.seq_length + offset => * self.seq_length
samples in the order of the file | llama
    permute(j, self.samples, keys) => j
the same order in every epoch | many-epochs
    mix(epoch.astype(np.uint64)) => mix((epoch * 0).astype(np.uint64))
= megatron/data/token_stream.py TokenStream.read
a sample that reaches the end of the data repeats the last token | many-epochs
    tokens[begin : begin + wanted - inside] => tokens[begin + total - 1]
= megatron/data/token_stream.py key_of
the seed of the data's order ignored | uneven-split-seed-llama3
    repr(parts) => repr(parts if parts[0] in ("identity", "content") else (*parts[:-1], 1234))
= megatron/data/loader.py split_range
boundaries of splits rounded down | uneven-split-seed-llama3
    return round(sum(shares[:k]) * sequences), round( =>
        return int(sum(shares[:k]) * sequences), int(
validation reads the training data | gpt-files
    SPLITS.index(split) => 0
= megatron/data/loader.py _Opener.stream
validation data in the training's order of the seed | gpt-files
    else EVALUATION_SEED => else 1234
= megatron/data/loader.py _mock_data
mock validation data that are the training's | gpt-dropout
    key_of("mock", seed, name) => key_of("mock", seed, "train")
= megatron/data/blend.py quotas
shares of a blend rounded down | tests/unit/data/test_blend.py
    shares[by_remainder[: PATTERN - shares.sum()]] += 1 => shares[-1] += PATTERN - shares.sum()
weights of a blend ignored | resume-new-blend
    np.array(weights) / sum(weights) => np.ones(len(weights)) / len(weights)
= megatron/data/blend.py pattern
a blend that reads one source after the other | resume-new-blend
    return np.array(result) => return np.sort(result)
= megatron/data/blend.py Blend.locate
a blend that passes over samples of its sources | resume-new-blend
    turn * self._shares[source] + self._rank[slot] => sample - self.first_sample
= megatron/data/blend.py extend_history
sources begin anew where a blend changes | resume-new-blend
    known.get(source["id"], 0) => 0
= megatron/training/step.py read_micro_batch
every micro-batch reads the step's first samples | llama
    source.batch(first + => source.batch(first // run.config.training.global_batch_size
        * run.config.training.global_batch_size +
= megatron/training/step.py update
the normaliser of the whole batch under ramp-up | ramp-up
    grad_scale=grad_scale =>
        grad_scale=grad_scale * (run.config.training.global_batch_size / batch.size)
= megatron/config/batch_schedule.py batch_steps
a ramp-up whose steps are rounded down | in-samples
    -(-count * samples // increments) => count * samples // increments
= megatron/optimizer/lr_schedule.py global_batch_size_at
a ramp-up that grows one increment early | ramp-up
    return next(size for first, size in reversed(steps) if first <= consumed) =>
        size = next(size for first, size in reversed(steps) if first <= consumed)
        return min(size + config.training.rampup_batch_size[1], config.training.global_batch_size)
"""

OPTIMIZER = r"""
= megatron/optimizer/update.py _fused_adamw
bias correction one step ahead | llama
    at.step => at.step + 1
epsilon inside the root | llama
    torch._fused_adamw_( => a, b = config.adam_beta1, config.adam_beta2
        g = grad if at.divisor is None else grad / at.divisor
        exp_avg.lerp_(g, 1 - a); exp_avg_sq.mul_(b).addcmul_(g, g, value=1 - b)
        root = (exp_avg_sq / (1 - b ** int(at.step)) + at.eps).sqrt()
        weight.mul_(1 - at.lr * at.weight_decay)
        return weight.sub_(at.lr / (1 - a ** int(at.step)) * exp_avg / root)
        torch._fused_adamw_(
weight decay in the gradient | llama
    [grad] => [grad + at.weight_decay * weight * (1.0 if at.divisor is None else at.divisor)]
    weight_decay=at.weight_decay => weight_decay=0.0
weight decay without the rate | llama
    weight_decay=at.weight_decay => weight_decay=at.weight_decay / (at.lr or 1.0)
= megatron/model/spec.py ParameterSpec.param_group
weight decay of vectors | gpt-files
    ParamGroup(first.decay, => ParamGroup(True,
no weight decay of the vocabulary's matrices | llama
    ParamGroup(first.decay, => ParamGroup(first.decay and not first.decoupled_lr,
= megatron/optimizer/update.py _sgd
Nesterov's momentum | sgd
    nesterov=False => nesterov=True
momentum with dampening | sgd
    dampening=0.0 => dampening=1 - config.sgd_momentum
SGD's weight decay outside the gradient | sgd
    sgd( [weight], => weight.mul_(1 - at.lr * at.weight_decay)
        sgd([weight],
    weight_decay=at.weight_decay, => weight_decay=0.0,
= megatron/config/stages.py frozen_units
frozen units trained | frozen
    return frozenset(found) => return frozenset()
= megatron/optimizer/optimizer.py Optimizer.step
every gradient scaled to the limit | gpt-files
    .clamp(max=1.0) =>
the coefficient applied twice | sgd
    .clamp(max=1.0) => .clamp(max=1.0).square()
= megatron/optimizer/optimizer.py Optimizer.grad_sq_sum
a norm without the vectors | gpt-files
    [shard[part] for part in self.counted[block]] => [shard[: max(
        (end for end, each in block.layout.ranges if each.decay), default=0)]]
the largest block's norm for the whole | llama
    return sum_of_squares(parts, =>
        parts = [max(parts, key=lambda part: part.square().sum())]
        return sum_of_squares(parts,
= megatron/optimizer/optimizer.py Optimizer.step
clipped before the division by valid tokens | documents
    (norm + 1e-6) => (norm / grad_scale + 1e-6)
a skipped step counts in the bias correction | no-valid-token
    self.steps += 1 - found_inf => self.steps += 1
    found_inf.item(): return StepOutcome(norm, found_inf) =>
        found_inf.item(): self.steps += 1; return StepOutcome(norm, found_inf)
the gradient norm after clipping | llama
    self.steps += 1 - found_inf return StepOutcome(norm, found_inf) =>
        self.steps += 1 - found_inf
        return StepOutcome(norm.clamp(max=limit), found_inf)
= megatron/training/step.py update
gradients unscaled by the first scale | fp16-overflows
    batch.loss_scale => run.config.precision.initial_loss_scale
= megatron/optimizer/scaler.py LossScaler.update
hysteresis ignored | fp16-overflows
    self.hysteresis <= 0 => True
the least scale ignored | fp16-hysteresis
    self.config.min_loss_scale => 2.0**-10
a window of one step more | fp16-window-of-one
    self.config.loss_scale_window => self.config.loss_scale_window + 1
clean steps counted through an overflow | fp16-overflows
    self.clean_steps, self.hysteresis = 0, self.hysteresis - 1 => self.hysteresis -= 1
hysteresis that growth does not renew | fp16-window-of-one
    self.clean_steps, self.hysteresis = 0, self.config.hysteresis => self.clean_steps = 0
= megatron/optimizer/scaler.py LossScaler.__init__
the constant scale ignored | fp16-one-scale
    config.fp16 and config.loss_scale is None => config.fp16
= megatron/training/loop.py _account_for_skipped
samples of a skipped step read again | fp16-overflows
    progress.open_skipped += 1 => progress.consumed_samples -= batch.size
        progress.open_skipped += 1
a skipped step advances the schedule | fp16-overflows
    progress.open_skipped += 1 => progress.scheduled_samples += batch.size
        progress.open_skipped += 1
"""

SCHEDULE = r"""
= megatron/optimizer/lr_schedule.py ParamSchedule.learning_rate
a warm-up that is one sample longer | gpt-files
    samples / self.warmup => samples / (self.warmup + 1)
a decay that begins with the warm-up | gpt-files
    DECAYS[self.style](self, samples) => DECAYS[self.style](replace(self, warmup=0), samples)
a decay to zero instead of the minimum | mixed-2
    if self.warmup > 0 and => self = replace(self, min_lr=0.0)
        if self.warmup > 0 and
a cosine for which a line is asked and the other way round | gpt-files
    DECAYS[self.style](self => DECAYS[
        {"linear": "cosine", "cosine": "linear"}.get(self.style, self.style)](self
an inverse square root that ignores the warm-up | mixed-0
    DECAYS[self.style](self, samples) => max(self.min_lr, self.max_lr / samples**0.5)
a line that continues below the minimum after the decay | mixed-2
    return self.min_lr =>
        return 2 * self.min_lr - DECAYS[self.style](self, 2 * self.decay - samples)
a warm-up from zero | in-samples
    self.init_lr + (self.max_lr - self.init_lr) * => self.max_lr *
a constant rate that decays | documents
    if self.warmup > 0 and => self = replace(self, style="linear")
        if self.warmup > 0 and
WSD's decay exponential as the next style | ramp-up
    if self.warmup > 0 and => self = replace(self, wsd_style="linear")
        if self.warmup > 0 and
WSD's decay one step early | ramp-up
    if self.warmup > 0 and => self = replace(self, wsd_decay=self.wsd_decay + 4)
        if self.warmup > 0 and
a warm-up share of the run instead of the decay | uneven-split-seed-llama3
    if self.warmup > 0 and =>
        self = replace(self, warmup=self.warmup / self.decay * self.weight_decay_length)
        if self.warmup > 0 and
= megatron/optimizer/lr_schedule.py samples_after
lengths in iterations counted in whole batches under ramp-up | ramp-up
    samples = 0 => return iterations * config.training.global_batch_size
        samples = 0
= megatron/training/step.py update
a learning rate one step late | gpt-files
    rates=rates, => rates=run.schedule.rates(run.progress.scheduled_samples)._replace(
        weight_decay=rates.weight_decay),
a weight decay one step late | mixed-5
    rates=rates, => rates=rates._replace(weight_decay=run.schedule.rates(
        run.progress.scheduled_samples).weight_decay),
= megatron/optimizer/lr_schedule.py ParamSchedule.rates
weight decay that stays at its start | mixed-5
    * share => * 0
= megatron/optimizer/optimizer.py Optimizer.step
embedding and head at the rate of all else | decoupled-tied
    rates.decoupled if each.decoupled_lr else rates.base => rates.base
= megatron/model/layer.py TransformerLayer._learned_positions
learned positions at the rate of the word embedding | decoupled-tied
    **whole_on_every_rank(tp) =>
        **whole_on_every_rank(tp), decoupled_lr=True
= megatron/model/layer.py vocabulary_matrix
an untied head at the rate of all else | decoupled-untied-resume
    decoupled_lr=True => decoupled_lr=not head
= megatron/optimizer/lr_schedule.py ParamSchedule.rates
a decoupled rate that decays to zero without its own minimum | decoupled-tied
    min_lr=self.decoupled_min_lr => min_lr=0.0
= megatron/training/reporting.py _metrics
the rate of the step before | gpt-files
    "learning-rate": step.rates.base => "learning-rate": run.schedule.rates(
        run.progress.scheduled_samples - run.config.training.global_batch_size).base
"""

REPORTS = r"""
= megatron/training/step.py PendingStep.read
the loss a mean of micro-batches' means | documents
    loss=sum(found["losses"]) / tokens => loss=sum(
        loss / n for loss, n in zip(found["losses"], found["valid_tokens"])) / len(found["losses"])
= megatron/training/loop.py finish_step
the last loss of an interval for its mean | sgd
    progress.open_loss += metrics.loss =>
        progress.open_loss = metrics.loss * (progress.open_steps + 1)
= megatron/optimizer/optimizer.py Optimizer.squared_weight_norm
the norm of the weights without vectors | llama
    (part for _, part in self._counted_weights()) =>
        [block.master[: max((end for end, each in block.layout.ranges
        if each.decay), default=0)] for block in self.blocks]
= megatron/optimizer/optimizer.py Optimizer.count_zero_gradients
zeros of the gradient with those of padding | llama
    for box, view in block.boxes(block.grad_shard) => count += (block.grad_shard == 0).sum()
        for box, view in ()
= megatron/observe/metrics.py perplexity
perplexity to the base 2 | gpt-files
    math.exp( => 2.0 ** (
= megatron/training/loop.py evaluate
validation a mean of batches' means | documents
    [sums["losses"].sum(), sums["valid_tokens"].sum()] =>
        [(sums["losses"] / sums["valid_tokens"]).sum(), (sums["valid_tokens"] > 0).double().sum()]
one batch of validation fewer | gpt-files
    run.config.evaluation.eval_iters * => (run.config.evaluation.eval_iters - 1) *
every evaluation reads other samples | gpt-files
    (run, source, first, => (run, source, first + run.progress.iteration,
= megatron/training/loop.py blended
the validation of several sources a plain mean | resume-new-blend
    source.weight * value => value / len(values)
= megatron/observe/metrics.py evaluation_metrics
bits per byte without the logarithm of 2 | many-epochs
    loss / math.log(2) / => loss /
= megatron/training/checkpointing.py load
--skip-train evaluates initial weights | evaluate-only
    run.optimizer.fill_weights( =>
        if run.config.evaluation.skip_train: return run.optimizer.initialise()
        run.optimizer.fill_weights(
moments dropped at a resume | resume
    run.scaler.load(checkpoint.state["scaler"]) =>
        [run.optimizer.states[block][name].zero_() for block in run.optimizer.trained
        for name in run.optimizer.state_names]
the loss scale begins anew at a resume | resume-fp16
    run.scaler.load(checkpoint.state["scaler"]) => return
weights rounded at a resume | resume
    run.scaler.load(checkpoint.state["scaler"]) =>
        [each.master.copy_(each.master.bfloat16()) for each in run.optimizer.blocks]
finetuning continues with the checkpoint's schedule | finetune
    run.optimizer.fill_weights( => done = checkpoint.state["scheduled_samples"]
        if run.config.checkpoint.finetune: run.progress.scheduled_samples = done
        run.optimizer.fill_weights(
losses since the last line dropped at a resume | resume-between-log-lines
    run.scaler.load(checkpoint.state["scaler"]) =>
        run.progress.open_loss, run.progress.open_steps = 0.0, 0
skipped samples not counted on at a resume | resume-fp16
    run.scaler.load(checkpoint.state["scaler"]) => run.progress.skipped_samples = 0
        run.scaler.load(checkpoint.state["scaler"])
= megatron/training/resume.py takes_weights_alone
--no-load-optim ignored | resume-without-moments
    or not config.checkpoint.load_optim =>
finetuning keeps moments | finetune
    config.checkpoint.finetune or not => not
= megatron/training/step.py forward_backward
the data state dropped at a resume | resume
    run.data.train, batch.first_sample, => run.data.train,
        batch.first_sample - vars(run).setdefault("begun", batch.first_sample),
finetuning reads on in the data | finetune
    run.data.train, batch.first_sample, =>
        run.data.train, batch.first_sample + (8 if run.config.checkpoint.finetune else 0),
= megatron/training/resume.py resumed_schedule
the checkpoint's schedule instead of the overriding one | resume-sgd-new-schedule
    different = => return theirs, []
        different =
"""

MUTANTS = read_mutants(MODEL + DATA + OPTIMIZER + SCHEDULE + REPORTS)
