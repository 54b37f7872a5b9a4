"""Runs whose memory is measured, and what each may hold: by hand from the flags, with nothing of
the planner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from unit.zero.tracker import Span

KIB = 1024
GRID = 64  # elements on which every tensor begins
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SMALL = {"layers": 6, "hidden": 112, "heads": 4, "seq": 32, "vocab": 1024}  # 1.0M parameters
FOUR = tuple({**SMALL, "layers": 4}.items())  # a layer for each stage of a V
V, SPLIT = "--pipeline-schedule zero-bubble-v", "--pipeline-schedule zero-bubble"
COMMON = """--mock-data --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 64
--hidden-dropout 0 --attention-dropout 0 --lr 1e-3
--micro-batch-size 1 --train-iters 2 --log-interval 1 --eval-interval 1 --eval-iters 1
--nan-policy skip"""
MODELS = {
    "gpt": "",  # tied, learned positions, LayerNorm, biases
    "llama": (
        "--swiglu --normalization RMSNorm --position-embedding-type rope "
        "--disable-bias-linear --untie-embeddings-and-output-weights"
    ),
}
PRECISIONS = {  # flags; bytes of a weight in computation, and of an accumulated gradient
    "bf16": ("--bf16", 2, 4),
    "fp16": ("--fp16 --initial-loss-scale 1024", 2, 4),
    "fp32": ("", 4, 4),
    "narrow": ("--bf16 --main-grads-dtype bf16", 2, 2),
}
WIDE = 4  # bytes of a master weight and of each moment


def on_grid(elements: int, parts: int = 1) -> int:
    return -(-elements // (GRID * parts)) * GRID * parts


@dataclass(frozen=True)
class Row:
    """One run: stage, data-parallel ranks, pipeline ranks, micro-batches on each rank; `shard`
    ranks share (0: all), `flags` are added.
    """

    stage: int
    dp: int
    pp: int = 1
    micro: int = 1
    precision: str = "bf16"
    model: str = "gpt"
    flags: str = ""
    shard: int = 0
    size: tuple[tuple[str, int], ...] = tuple(SMALL.items())

    def __str__(self) -> str:
        size = dict(self.size)
        words = [f"stage{self.stage}", f"dp{self.dp}", f"pp{self.pp}", f"m{self.micro}"]
        words += [self.precision, self.model]
        words += [f"{size['layers']}x{size['hidden']}-v{size['vocab']}"] if size != SMALL else []
        words += [f"shard{self.shard}"] if self.shard else []
        return "-".join([*words, *self.flags.replace("--", "").split()])

    @property
    def world(self) -> int:
        return self.dp * self.pp

    @property
    def sharers(self) -> int:
        return self.shard or self.dp

    @property
    def command(self) -> tuple[str, ...]:
        """The command line."""
        size = dict(self.size)
        flags = f"""{COMMON} {MODELS[self.model]} {PRECISIONS[self.precision][0]}
        --num-layers {size["layers"]} --hidden-size {size["hidden"]}
        --num-attention-heads {size["heads"]} --seq-length {size["seq"]}
        --max-position-embeddings {size.get("positions", size["seq"])}
        --vocab-size {size["vocab"] - 1} --zero-stage {self.stage}
        --pipeline-model-parallel-size {self.pp}
        --global-batch-size {self.dp * self.micro} {self.flags}"""
        return (*flags.split(), *(("--zero-shard-size", str(self.shard)) if self.shard else ()))

    @property
    def offloaded(self) -> bool:
        """Whether the host holds weights and optimizer. A block is stepped, and its gradient freed,
        when the next pass comes near it.
        """
        return "--param-cpu-offload" in self.flags

    @property
    def has_v(self) -> bool:
        return "zero-bubble-v" in self.flags

    def stages_of(self, pipe: int) -> list[int]:
        """Stages of a pipeline rank; the V schedule has two on each, down the ranks and up
        again.
        """
        return [pipe, 2 * self.pp - 1 - pipe] if self.has_v else [pipe]

    def blocks(self, pipe: int) -> dict[str, int]:
        """Elements of each block of a pipeline rank, with the padding of tensors and slices."""
        size, gpt = dict(self.size), self.model == "gpt"
        h, layers, count = size["hidden"], size["layers"], self.pp * (1 + self.has_v)
        found: dict[str, int] = {}
        for stage in self.stages_of(pipe):
            if stage == 0:
                found["embedding"] = [size["vocab"] * h]
            for layer in range(stage * layers // count, (stage + 1) * layers // count):
                if gpt:
                    attention, mlp = [3 * h * h, 3 * h, h * h, h], [4 * h * h, 4 * h, 4 * h * h, h]
                    positions = [size.get("positions", size["seq"]) * h] * (layer == 0)
                    final_norm = [h, h] * (layer == layers - 1)
                    tensors = [*attention, *mlp, h, h, h, h, *positions, *final_norm]
                else:
                    f = 8 * h // 3 // GRID * GRID
                    tensors = [3 * h * h, h * h, 2 * f * h, f * h, h, h] + [h] * (
                        layer == layers - 1
                    )
                found[f"layer {layer}"] = tensors
            if stage == count - 1 and not (gpt and "embedding" in found):
                found["head"] = [size["vocab"] * h]
        return {
            name: on_grid(sum(map(on_grid, tensors)), self.dp) for name, tensors in found.items()
        }

    def resident(self, pipe: int) -> dict[str, float]:
        """Bytes by kind when the passes of a step are over. Between two steps there are no
        gradients.
        """
        elements, n, stage = sum(self.blocks(pipe).values()), self.sharers, self.stage
        _, weight, gradient = PRECISIONS[self.precision]
        updated = elements / n if stage >= 1 else elements
        # fp32 weights are their own masters
        state = updated * WIDE * (2 if weight == WIDE and stage < 3 else 3)
        return {
            "parameters": 0 if stage == 3 else weight * elements,
            "gradients": gradient * (elements / n if stage >= 2 else elements),
            "optimizer": 0 if self.offloaded else state,
            "host": state + (weight * updated if weight < WIDE else 0) if self.offloaded else 0,
        }

    def largest_two(self, pipe: int) -> int:
        """Elements of the two largest blocks that may live together: never both embedding and
        head.
        """
        blocks = self.blocks(pipe)
        layers = sorted(size for name, size in blocks.items() if name.startswith("layer"))
        matrix = [size for name, size in blocks.items() if not name.startswith("layer")][:1]
        return sum(sorted(layers + matrix)[-2:])

    def slots(self, pipe: int) -> int:
        """The most bytes of gradient buffers that come and go: two, and in addition to two layers'
        that of a matrix whose two ends lie here.
        """
        if self.stage < 2:
            return 0
        blocks, gradient = self.blocks(pipe), PRECISIONS[self.precision][2]
        if self.model == "gpt" and "embedding" in blocks and (self.pp == 1 or self.has_v):
            layers = sorted(size for name, size in blocks.items() if name.startswith("layer"))
            return gradient * (sum(layers[-2:]) + blocks["embedding"])
        return gradient * self.largest_two(pipe)

    def gathered(self, pipe: int) -> int:
        """The most bytes of whole weights at stage 3."""
        weight = PRECISIONS[self.precision][1]
        return weight * (
            sum(self.blocks(pipe).values())
            if "keep-gathered" in self.flags
            else self.largest_two(pipe)
        )

    def scratch(self, pipe: int, pieces: int) -> int:
        """The most bytes of what is received, cast or formed on the way. Rounds of a reduction hold
        `pieces` bytes or half a layer's gradient; each of the two factors of a weight gradient is
        cast in pieces. Under a split backward pass, gradients that wait for those of the
        weights.
        """
        size = dict(self.size)
        factor = min(pieces, WIDE * size["seq"] * max(size["vocab"], 4 * size["hidden"]))
        gradient = PRECISIONS[self.precision][2]
        layers = {name: x for name, x in self.blocks(pipe).items() if name.startswith("layer")}
        early = 0
        if "zero-bubble" in self.flags and self.stage >= 2:
            h = size["hidden"]
            matrices = (
                12 * h * h
                if self.model == "gpt"
                else 4 * h * h + 3 * (8 * h // 3 // GRID * GRID) * h
            )
            early = gradient * self.micro * sum(elements - matrices for elements in layers.values())
        return max(gradient * max(layers.values()) // 2, pieces) + 2 * factor + early + KIB

    def falls(self, pipe: int) -> bool:
        """Whether the peak of a step must fall from stage 1 to 2: the slots are smaller than the
        gradients that are shared out.
        """
        elements, gradient = sum(self.blocks(pipe).values()), PRECISIONS[self.precision][2]
        return replace(self, stage=2).slots(pipe) < gradient * elements * (1 - 1 / self.sharers)


def fullest(spans: dict[str, list[Span]]) -> tuple[int, Span]:
    """The most bytes of a step that the run itself holds, and when."""
    span = max(spans["step"], key=lambda each: each.peak["total"] - each.peak["before"])
    return span.peak["total"] - span.peak["before"], span


def faults(row: Row, pipe: int, spans: dict[str, list[Span]], pieces: int) -> list[str]:
    """Where a rank held more, or outside of the passes less, than it should."""
    found, due = [], row.resident(pipe)

    def expect(what: str, held: float, least: float, most: float) -> None:
        if not least <= held <= most:
            found.append(
                f"{row}, pipeline rank {pipe}, {what}: {held:,.0f} bytes, not in "
                f"[{least:,.0f}, {most:,.0f}]"
            )

    for when in ("between", "step"):
        for number, span in enumerate(spans[when]):
            waiting = row.offloaded and span.now["gradients"] > 0 and number > 0
            wanted = due if when == "step" or waiting else {**due, "gradients": 0}
            for kind, size in wanted.items():
                expect(f"{kind} after {when} {number}", span.now[kind], size, size)
            total, slack = sum(wanted.values()), 64 * KIB + sum(wanted.values()) / 1000
            expect(
                f"all after {when} {number}",
                span.now["total"] - span.now["before"],
                total,
                total + slack,
            )
    for number, span in enumerate(spans["update"]):
        for kind, size in due.items():
            expect(f"{kind} in update {number}", span.peak[kind], size, size)
    for what in ("step", "evaluation"):
        training = what == "step"
        slots, gradients = (row.slots(pipe), due["gradients"]) if training else (0, 0)
        scratch = row.scratch(pipe, pieces) if training else KIB
        gathered = row.gathered(pipe) if row.stage == 3 else due["parameters"]
        least_gathered = gathered / (2 if training or row.stage < 3 else 8)
        waiting = due["gradients"] if row.offloaded else 0
        bounds = {
            "slots": (slots / 2, slots),
            "scratch": (0, scratch),
            "parameters": (least_gathered, gathered),
            "gradients": (gradients, max(gradients, waiting)),
            "optimizer": (due["optimizer"], due["optimizer"]),
            "host": (due["host"], due["host"]),
        }
        for number, span in enumerate(spans[what], 1):
            for kind, (least, most) in bounds.items():
                expect(f"{kind} in {what} {number}", span.peak[kind], least, most)
    # the last one is of the test set
    assert len(spans["step"]) == 2 and len(spans["evaluation"]) == 3
    return found
