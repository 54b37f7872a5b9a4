"""Attention in Gluon for Hopper: forward (gluon_forward.py) and backward (gluon_backward.py).

Compiled, and checked on a CPU; never run on a GPU. A candidate for attention is a module with these
names, listed in dispatch.CANDIDATES and loaded only for a run or a benchmark that asks for it:

    unsupported_reason(device, dtype)            why it cannot run on such tensors, or None
    unsupported_heads(d, softcap=..., drop=...)  what it cannot compute of this, or None
    forward(q, k, v, mask, options)              (out, lse) as attention.forward, without dropout
    backward(dout, dlse, out, lse, qkv, mask, options)   gradients as attention_backward.backward
    KEYS                                         keys of a program, for the size of its workspace
"""

from megatron.kernels.candidates.gluon_backward import KEYS, backward
from megatron.kernels.candidates.gluon_forward import (
    forward,
    unsupported_heads,
    unsupported_reason,
)

__all__ = ["KEYS", "backward", "forward", "unsupported_heads", "unsupported_reason"]
