"""Breaks the code on purpose, one place at a time: the table of parity must notice.

Each mutant replaces a piece of code, which must be there exactly once (by its tokens:
fragments.py). New ranks put it in and run the default rows that are named here for it; the
comparison with the healthy one-process run must find fault with one of them. tests/mutants.py
prints the table of all.
"""

from __future__ import annotations

import gc
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

from fragments import replaced

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """`old` -> `new` in a file; `rows` (ids of ci_rows) of which at least one must fail."""

    name: str
    file: str
    old: str
    new: str
    rows: tuple[str, ...]


MODEL, ATTENTION, STEP = "megatron/model", "megatron/model/attention", "megatron/training/step.py"
PIPELINE = "megatron/parallel/pipeline.py"
ZERO, ZERO_PLAN, BLOCKS, OPTIMIZER = (
    "megatron/parallel/zero.py",
    "megatron/parallel/zero_plan.py",
    "megatron/parallel/blocks.py",
    "megatron/optimizer/optimizer.py",
)


def unsummed(name: str, file: str, old: str, new: str, *rows: str) -> Mutant:
    """A tensor that declares no sum of its gradients."""
    return Mutant(f"no sum of {name}", file, old, new, rows)


MUTANTS = (
    unsummed(
        "layer norms",
        f"{MODEL}/layer.py",
        "config.hidden_size, sums)",
        """config.hidden_size, () if name.endswith("input_norm") else sums)""",
        "fp64-llama-tp2-sp-serial",
    ),
    unsummed(
        "the final norm",
        f"{MODEL}/layer.py",
        "config.hidden_size, sums)",
        """config.hidden_size, () if name == "final_norm" else sums)""",
        "fp64-llama-tp2-sp-serial",
    ),
    unsummed(
        "row-parallel biases",
        f"{MODEL}/mlp.py",
        """h, copies="tp", grad_sum=sums""",
        """h, copies="tp", grad_sum=()""",
        "fp64-documents-tp2-sp",
    ),
    unsummed(
        "positions",
        f"{MODEL}/layer.py",
        """copies="tp",
            grad_sum=grad_sum""",
        """copies="tp",
            grad_sum=()""",
        "fp64-documents-tp2-sp",
    ),
    unsummed(
        "QK norms",
        f"{ATTENTION}/attention.py",
        """grad_sum=("tp",)""",
        "grad_sum=()",
        "fp64-mqa-qknorm-bias-tp2-dp2",
    ),
    unsummed(
        "shared key/value heads",
        f"{ATTENTION}/attention.py",
        """"grad_sum": ("kv",)""",
        """"grad_sum": ()""",
        "fp64-mqa-bias-tp2",
    ),
    Mutant(
        "no sum of a row-parallel layer's outputs",
        f"{MODEL}/linear.py",
        "y = all_reduce(gemm(x, weight), tp.axis)",
        "y = gemm(x, weight)",
        ("fp64-gpt-tp2",),
    ),
    Mutant(
        "no sum of a column-parallel layer's input gradients",
        f"{MODEL}/linear.py",
        "summing = start(dx, tp.axis)",
        "summing = start(dx, tp.axis if tp.sequence else NO_TP.axis)",
        ("fp64-gpt-tp2",),
    ),
    Mutant(
        "a row-parallel bias added on every rank",
        f"{MODEL}/linear.py",
        "return y if bias is None else y.add_(bias)",
        "return y if bias is None else y.add_(bias * tp.size)",
        ("fp64-gpt-tp2",),
    ),
    Mutant(
        "a column-parallel bias learnt on one rank alone",
        f"{MODEL}/linear.py",
        "bias_grad.add_(left.dy.flatten(",
        "bias_grad.add_((ctx.tp.axis.rank == 0) * left.dy.flatten(",
        ("fp64-gpt-tp2",),
    ),
    Mutant(
        "the own rows of an overlapped product in another order",
        "megatron/distributed/collectives.py",
        "yield slice(first, behind), x",
        "yield slice(first, behind), x.flip(0)",
        ("fp64-documents-tp2-sp",),
    ),
    Mutant(
        "the halves of an overlapped sum in another order",
        f"{MODEL}/linear.py",
        "for half in weight.chunk(2)",
        "for half in weight.chunk(2)[::-1]",
        ("fp64-documents-tp2-sp",),
    ),
    Mutant(
        "a reduce-scatter without some rank's part",
        "megatron/distributed/collectives.py",
        "torch.add(parts[0], parts[1], out=out)",
        "out.copy_(parts[axis.rank])",
        ("fp64-gpt-dp2-serial",),
    ),
    Mutant(
        "a weight's first product added to what the last step left",
        f"{MODEL}/main_grad.py",
        """overwrite = getattr(weight, "overwrite_main_grad", False)""",
        "overwrite = False",
        ("fp64-gpt-tp2",),
    ),
    Mutant(
        "every product overwrites",
        f"{MODEL}/main_grad.py",
        """overwrite = getattr(weight, "overwrite_main_grad", False)""",
        "overwrite = True",
        ("fp64-gpt-tp2",),
    ),
    Mutant(
        "overlapping vocabulary ranges of the embedding",
        f"{MODEL}/embedding.py",
        "local = ids - tp.axis.rank * weight.shape[0]",
        "local = ids - tp.axis.rank * (weight.shape[0] - 1)",
        ("fp64-gpt-tp2",),
    ),
    Mutant(
        "shifted labels of the cross-entropy",
        f"{MODEL}/loss.py",
        "labels.flatten() - columns.first",
        "labels.flatten() - columns.first - columns.tp.axis.rank",
        ("fp64-gpt-tp2",),
    ),
    Mutant(
        "a maximum of logits not shared",
        f"{MODEL}/loss.py",
        "(sums * (tops - top).exp_()).sum(0)",
        "sums.sum(0)",
        ("fp64-gpt-tp2",),
    ),
    Mutant(
        "probability for padded vocabulary",
        f"{MODEL}/loss.py",
        "columns = min(max(vocab_size - first, 0), width)",
        "columns = width",
        ("fp64-padding-tp2-sp",),
    ),
    Mutant(
        "a fused head whose ranks keep their part of dx",
        f"{MODEL}/linear_cross_entropy.py",
        "else all_reduce(dx, tp.axis)",
        "else dx",
        ("fp64-fused-head-tp2-dp2",),
    ),
    Mutant(
        "a fused head's chunks that leave tokens out",
        f"{MODEL}/linear_cross_entropy.py",
        "range(0, x.shape[0], step)",
        "range(0, x.shape[0] - step, step)",
        ("fp64-fused-head-tp2-sp",),
    ),
    Mutant(
        "heads of every rank numbered from 0 in dropout",
        f"{ATTENTION}/attention.py",
        "self.first_head = tp.axis.rank * self.heads",
        "self.first_head = 0",
        ("fp64-dropout-tp2",),
    ),
    Mutant(
        "positions of every rank counted from 0 in dropout",
        f"{MODEL}/gpt.py",
        "hidden_dropout=DropoutState(sample_ids, token_index[own])",
        "hidden_dropout=DropoutState(sample_ids, token_index[own] - token_index[own][0])",
        ("fp64-documents-tp2-sp",),
    ),
    Mutant(
        "the first positions embedded on every rank",
        f"{MODEL}/gpt.py",
        "position_ids=position_ids[own]",
        "position_ids=position_ids[: len(position_ids[own])]",
        ("fp64-documents-tp2-sp",),
    ),
    Mutant(
        "key/value heads of another rank",
        f"{MODEL}/spec.py",
        "tp.axis.rank // sharing * extent",
        "tp.axis.rank % tensor.shard.count(tp.size) * extent",
        ("fp64-gqa2-qknorm-tp4-sp",),
    ),
    Mutant(
        "samples of neighbouring data-parallel ranks overlap",
        "megatron/training/run.py",
        "return first + self.config.training.micro_batch_size * self.groups.dp.rank",
        "return first + self.groups.dp.rank",
        ("fp64-gpt-dp2-serial",),
    ),
    Mutant(
        "a data-parallel mean",
        ZERO,
        "slice_ = pending.wait()",
        "slice_ = pending.wait().div_(block.shard.size)",
        ("fp64-gpt-dp2-serial",),
    ),
    Mutant(
        "one block not reduced",
        ZERO,
        "for block in self.trained:\n                    self._reduce",
        "for block in self.trained[1:]:\n                    self._reduce",
        ("fp64-gpt-dp2-serial",),
    ),
    Mutant(
        "reduced one micro-batch too early",
        ZERO_PLAN,
        "if often else count",
        "if often else count - 1",
        ("fp64-documents-tp2-dp2",),
    ),
    Mutant(
        "local instead of global token count",
        STEP,
        "nominal / (tokens.sum() * ",
        "nominal / (all_reduce(result.sums.tokens.sum(), run.groups.tp) * run.groups.dp.size * ",
        ("fp64-uneven-tp2-dp2",),
    ),
    Mutant(
        "scaled by the data-parallel size",
        STEP,
        "nominal / (tokens.sum() * ",
        "nominal / (run.groups.dp.size * tokens.sum() * ",
        ("fp64-gpt-dp2-serial",),
    ),
    Mutant(
        "replicated parameters counted on every rank in the norm",
        BLOCKS,
        "if holders(box, groups).rank > 0:",
        "if False:",
        ("fp64-gpt-tp2",),
    ),
    Mutant(
        "the tied matrix counted twice in the norm",
        OPTIMIZER,
        "        for block in self.trained:\n            shard = block.grad_shard\n",
        "        for block in [*self.trained, self.trained[0]]:\n"
        "            shard = block.grad_shard\n",
        ("fp64-gpt-tp2",),
    ),
    Mutant(
        "evaluation of one rank's samples alone",
        "megatron/training/evaluate.py",
        "all_reduce(total, run.groups.world)",
        "total",
        ("fp64-gpt-dp2-serial",),
    ),
    Mutant(
        "an overflow noticed by one rank alone",
        STEP,
        "grad_sq_sum=totals.grad_sq_sum",
        (
            "grad_sq_sum=totals.grad_sq_sum.nan_to_num(1.0, 1.0, 1.0) "
            "if run.optimizer.grad_sq_sum().isfinite() else run.optimizer.grad_sq_sum()"
        ),
        ("fp16-gpt-tp2-sp",),
    ),
    # ---- pipelines
    Mutant(
        "a rank's virtual stages in the wrong order",
        f"{MODEL}/build.py",
        "if rank == groups.pp.rank)",
        "if rank == groups.pp.rank)[:: -1 if groups.pp.rank == 1 else 1]",
        ("fp64-dropout-pp3-interleaved-v2",),
    ),
    Mutant(
        "layers numbered from 0 on every stage",
        f"{MODEL}/gpt.py",
        "self.layer_class(config, seed, i, tp, cp, ep)",
        "self.layer_class(config, seed, i - stage.layers.start, tp)",
        ("fp64-dropout-pp2-1f1b",),
    ),
    Mutant(
        "the final norm in the layer before",
        f"{MODEL}/layer.py",
        "if record.last else None",
        "if index == config.num_layers - 2 else None",
        ("fp64-m5-pp2-1f1b",),
    ),
    Mutant(
        "a gradient scaled on its way to the stage before",
        "megatron/parallel/messages.py",
        "(self.inbox if stays else self.outbox)[message] = x",
        "(self.inbox if stays else self.outbox)[message] = "
        "x if message.kind is Kind.FORWARD else x / len(self.placement)",
        ("fp64-m5-pp2-1f1b",),
    ),
    Mutant(
        "a buffer for all messages, so that saved inputs go stale",
        "megatron/distributed/collectives.py",
        """self.x = torch.empty(shape, dtype=dtype, device="cpu" if backend.on_host else device)""",
        """self.x = Receiving.__dict__.get("buffer", torch.empty(shape, dtype=dtype))
        Receiving.buffer = self.x""",
        ("fp64-m5-pp2-gpipe",),
    ),
    Mutant(
        "samples of another micro-batch on every stage",
        "megatron/training/passes.py",
        "first + index * run.chunk",
        "first + (index + run.groups.pp.rank) % len(tokens) * run.chunk",
        ("fp64-m5-pp2-1f1b",),
    ),
    Mutant(
        "weight gradients of another micro-batch",
        PIPELINE,
        "dy, saved = step.input_of(action), step.saved.pop((stage, micro))",
        "dy, saved = step.input_of(action), step.saved.pop((stage, micro))\n"
        "        if action.kind is Kind.BACKWARD_WEIGHT:\n"
        "            lists = [each for each in (*step.saved.values(), saved) if "
        "isinstance(each[-1], list)]\n"
        "            saved = deque([*kept] for kept in lists[0])",
        ("fp64-m5-pp2-zero-bubble",),
    ),
    Mutant(
        "no embedding gradient in the split backward",
        PIPELINE,
        "                    dy, kept = self.runner.backward(kind, layer, dy, saved.pop(), "
        "step.aux_scale)\n",
        "                    lost = action.kind is Kind.BACKWARD_INPUT and not "
        "layer.reads_weight_backward\n"
        "                    dy, kept = (saved.pop(), None) if lost else self.runner.backward("
        "kind, layer, dy, saved.pop(), step.aux_scale)\n",
        ("fp64-m5-pp2-zero-bubble",),
    ),
    Mutant(
        "no dropout in the second run of recomputation",
        "megatron/parallel/layer_runner.py",
        "saved = self.forward_again(layer, saved)[1]",
        """saved = self.forward_again(layer, saved._replace(micro=__import__("dataclasses").replace(
            saved.micro, dropout=None, hidden_dropout=None)))[1]""",
        ("fp64-recompute-pp2-zero-bubble",),
    ),
    Mutant(
        "reduced when the input gradients are complete",
        ZERO_PLAN,
        "if kind in COMPLETING:\n            found",
        "if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):\n            found",
        ("fp64-documents-pp2-zero-bubble-v-dp2",),
    ),
    Mutant(
        "a split backward reduced one micro-batch too early",
        ZERO_PLAN,
        "if often else count",
        "if often else count - 1",
        ("fp64-documents-pp2-zero-bubble-v-dp2",),
    ),
    Mutant(
        "partial gradients summed on the first pipeline rank alone",
        ZERO,
        "            sum_partial_gradients(self.trained, self.groups)",
        (
            "            if self.groups.pp.rank == 0:\n                "
            "sum_partial_gradients(self.trained, self.groups)"
        ),
        ("fp64-llama-pp2-1f1b-tp2-sp",),
    ),
    Mutant(
        "no sum of a tied matrix's gradients",
        ZERO,
        """, ("tied", groups.tied)""",
        "",
        ("fp64-gpt-pp2-gpipe",),
    ),
    Mutant(
        "a tied matrix summed over data-parallel ranks",
        "megatron/distributed/groups.py",
        """"tied": Partition(layout, ("pp",), ends)""",
        """"tied": Partition(layout, ("dp",), ends)""",
        ("fp64-documents-pp2-1f1b-dp2",),
    ),
    Mutant(
        "both copies of a tied matrix counted in the norm",
        BLOCKS,
        "if holders(box, groups).rank > 0:",
        """if box.replicated != "tied" and holders(box, groups).rank > 0:""",
        ("fp64-gpt-pp2-gpipe",),
    ),
    Mutant(
        "a norm of each stage",
        STEP,
        "grad_sq_sum=totals.grad_sq_sum",
        "grad_sq_sum=run.optimizer.grad_sq_sum()",
        ("fp64-m5-pp2-1f1b",),
    ),
    Mutant(
        "losses and tokens counted on every stage",
        "megatron/training/run.py",
        "return self.pipeline.has_head and self.groups.tp.rank == 0",
        "return self.groups.tp.rank == 0",
        ("fp64-m5-pp2-1f1b",),
    ),
    Mutant(
        "an evaluation on a stage without a head",
        "megatron/training/evaluate.py",
        "all_reduce(total, run.groups.world)",
        "all_reduce(total, run.groups.dp)",
        ("fp64-m5-pp2-1f1b",),
    ),
    # ---- ZeRO
    Mutant(
        "one block's gradients not added to the shard",
        ZERO,
        "else block.summed.add_(slice_)",
        "else block.summed.add_(slice_ if block is not self.blocks[1] else 0)",
        ("fp64-dropout-dp2-zero2",),
    ),
    Mutant(
        "the slice of another rank updated",
        BLOCKS,
        "mine = _equal_part((0, self.size), self.shard)",
        "other = replace(self.shard, rank=self.shard.size - 1 - self.shard.rank)\n"
        "        mine = _equal_part((0, self.size), other)",
        ("fp64-dropout-dp2-zero3",),
    ),
    Mutant(
        "a sum in the place of another rank's slice",
        BLOCKS,
        "buffer.narrow(0, self.shard.rank * length, length)",
        "buffer.narrow(0, (self.shard.size - 1 - self.shard.rank) * length, length)",
        ("fp64-dropout-dp2-zero1",),
    ),
    Mutant(
        "gathered weights not awaited",
        ZERO,
        "self.gathering.pop(block).wait()",
        "self.gathering.pop(block)",
        ("fp64-sgd-dp2-serial-zero3",),
    ),
    Mutant(
        "a block freed before its pass",
        ZERO,
        "        if not any(block in self.deferred for block in todo.prefetches):\n",
        "        [block.release() for block in todo.gathers if block not in todo.prefetches]\n"
        "        if not any(block in self.deferred for block in todo.prefetches):\n",
        ("fp64-dropout-dp2-zero3",),
    ),
    Mutant(
        "kept weights never freed, so that they go stale",
        ZERO_PLAN,
        "return self.remaining[buffers] > 0",
        "return True",
        ("fp64-dropout-dp2-zero3-kept",),
    ),
    Mutant(
        "weights gathered for forward passes alone",
        ZERO_PLAN,
        "kind is Kind.FORWARD\n            or (kind is not",
        "kind is Kind.FORWARD\n            or (False and kind is not",
        ("fp64-dropout-dp2-zero3",),
    ),
    Mutant(
        "the own slice gathered as it was left",
        ZERO,
        "own.copy_(block.kept, non_blocking=True)",
        "own.zero_()",
        ("fp64-dropout-dp2-zero3",),
    ),
    Mutant(
        "the shards' gradients kept from step to step",
        BLOCKS,
        "        self.summed = None\n",
        "",
        ("fp64-dropout-dp2-zero2",),
    ),
    Mutant(
        "a gradient buffer that does not begin with zeros",
        BLOCKS,
        "self.grad[first:last].zero_()",
        "self.grad[first:last].fill_(1)",
        ("fp64-dropout-dp2-zero2",),
    ),
    Mutant(
        "gradients that are complete early dropped",
        BLOCKS,
        "self.grad[self.plan.late :].copy_(self.early.pop(key))",
        "self.early.pop(key)",
        ("fp64-documents-pp2-zero-bubble-dp2-zero2",),
    ),
    Mutant(
        "a resident buffer reduced in every micro-batch",
        ZERO_PLAN,
        "often = self.zero_stage >= 2 and",
        "often = self.zero_stage >= 1 and",
        ("fp64-dropout-dp2-zero1",),
    ),
    Mutant(
        "a tied matrix whose last passes are not reduced",
        ZERO_PLAN,
        "if often else count",
        "if often else count - 1",
        ("fp64-gpt-pp2-zero-bubble-v-dp2-zero2",),
    ),
    Mutant(
        "a tied matrix's ends not summed",
        ZERO,
        """, ("tied", groups.tied)""",
        "",
        ("fp64-recompute-pp2-1f1b-dp2-zero3",),
    ),
    Mutant(
        "no sum over the copies of a slice",
        ZERO,
        "if block.groups.replicate.size > 1:",
        "if False:",
        ("fp64-gqa2-qknorm-dp4-shard2-zero2",),
    ),
    Mutant(
        "every copy of a slice counted in the norm",
        BLOCKS,
        "self.share = _equal_part(mine, groups.replicate)",
        "self.share = mine",
        ("fp64-gqa2-qknorm-dp4-shard2-zero1",),
    ),
    Mutant(
        "one block's weights not sent round",
        ZERO,
        "if self.zero_stage in (1, 2):",
        "if self.zero_stage in (1, 2) and block is not self.blocks[1]:",
        ("fp64-dropout-dp2-zero1",),
    ),
    Mutant(
        "weight decay counted from a shard's beginning",
        BLOCKS,
        "for stop, multipliers in self.plan.ranges:\n",
        "for stop, multipliers in ((first + stop, each) for stop, each in self.plan.ranges):\n",
        ("fp64-dropout-dp2-zero2",),
    ),
    Mutant(
        "partial gradients summed at a shard's beginning",
        BLOCKS,
        (
            "if low < high:\n                yield buffer[low - self.own[0] : high - "
            "self.own[0]]\n\n    def counted"
        ),
        "if low < high:\n                yield buffer[: high - low]\n\n    def counted",
        ("fp64-mqa-qknorm-bias-tp2-sp-dp2-zero2",),
    ),
    Mutant(
        "rows of a cut tensor misnamed",
        BLOCKS,
        "offset = box.offset[0] + row + first,",
        "offset = box.offset[0] + row,",
        ("fp64-dropout-dp2-zero1",),
    ),
    Mutant(
        "a narrow reduction that is none",
        ZERO,
        "out, self.reduce_dtype,",
        "out, None,",
        ("wire-gpt-dp2-zero2",),
    ),
)


def mutated(mutant: Mutant) -> str:
    """The file with the mutation. AssertionError when its code is not there exactly once: the list
    is stale.
    """
    try:
        return replaced((ROOT / mutant.file).read_text(), mutant.old, mutant.new)
    except AssertionError as error:
        raise AssertionError(f"{mutant.name}: {mutant.file}: {error}") from None


def functions_of(code: CodeType) -> Iterator[CodeType]:
    """The functions of a module and of its classes, in their order."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            is_function = each.co_flags & inspect.CO_OPTIMIZED
            yield from (each,) if is_function else functions_of(each)


def put_in(mutant: Mutant) -> None:
    """Gives the functions of the file the code of the mutation, so that this process is the mutant
    whatever has imported them.
    """
    module = importlib.import_module(mutant.file.removesuffix(".py").replace("/", "."))
    healthy, broken = (
        functions_of(compile(text, mutant.file, "exec", dont_inherit=True))
        for text in ((ROOT / mutant.file).read_text(), mutated(mutant))
    )
    new = {
        (old.co_qualname, old.co_firstlineno): code
        for old, code in zip(healthy, broken, strict=True)
    }
    gc.unfreeze()  # `get_objects` leaves out what is frozen (distributed/pool.py)
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__module__ == module.__name__:
            code = function.__code__
            function.__code__ = new.get((code.co_qualname, code.co_firstlineno), code)


def caught_by(mutant: Mutant) -> tuple[str, str] | None:
    """(row, first fault) of the first named row that notices; None when the mutant survives."""
    from distributed.pool import Hang, RankError, World
    from parity.compare import faults_of
    from parity.layouts import ci_rows
    from parity.worker import run_case

    rows = {str(row): row for row in ci_rows()}
    for name in mutant.rows:
        row = rows[name]
        world = World(row.world)  # ranks that no other mutant was put into
        try:
            world.run(put_in, mutant)
            try:
                outcomes = world.run(run_case, row.flags(layout=True), row.patches)
            except (Hang, RankError) as error:
                return name, str(error).strip().splitlines()[-1]
        finally:
            world.close()
        if faults := faults_of(row, outcomes):
            return name, faults[0]
    return None
