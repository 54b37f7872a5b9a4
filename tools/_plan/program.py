"""In what another program's runs differ from those of this one with the same flags.

A published row is planned as a run of the program that it was measured with, as far as the source
code of that program is public.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """A program that trains a model.

    `generation`: of its FlashAttention; None: the one that a backend of this program has.
    `launches`: how much of the host a kernel takes, in parts of ours. `whole_logits`: every
    tensor-parallel rank gathers the logits and computes the loss over the whole vocabulary with
    torch's operators. `fused_softmax`: attention keeps its scores, of which one kernel computes
    scale, mask and softmax. `transformer_engine`: tensor-parallel collectives are cut into chunks
    alongside GEMMs, and a tensor is quantised in one pass that writes it twice, as it is and
    transposed. `gathered_inputs`: under sequence parallelism, projections keep the
    gathered hidden states. `activated_gate`: SwiGLU keeps its activated gate. `normed`: norms keep
    what they multiply by their weight. `serial`: no tensor-parallel collective overlaps.
    """

    generation: int | None = None
    launches: float = 1.0
    whole_logits: bool = False
    fused_softmax: bool = False
    transformer_engine: bool = False
    gathered_inputs: bool = False
    activated_gate: bool = False
    normed: bool = False
    serial: bool = False


OURS = Program()
