"""Rows that kernels/tools/manifest.py must refuse, each for its own reason, and one that it must
not.
"""

import os
from dataclasses import replace

from megatron.kernels.configurations import Row
from megatron.kernels.lang import jit, tl
from megatron.kernels.tools import tune
from megatron.kernels.tools.shipped import Compiled


@jit
def product_kernel(a, b, c, K, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    row, column, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    total = tl.zeros([M, N], tl.float32)
    for k in range(0, K, D):
        left = tl.load(a + row[:, None] * K + k + inner[None, :])
        total = tl.dot(left, tl.load(b + (k + inner[:, None]) * N + column[None, :]), total)
    tl.store(c + row[:, None] * N + column[None, :], total.to(tl.bfloat16))


@jit
def wrong_kernel(a, N: tl.constexpr):
    tl.store(a + tl.arange(0, N), no_such_function(a))  # noqa: F821


class Deadly:
    """A compiler that aborts."""

    @property
    def arg_names(self):
        os.abort()


def aot():
    pointers = {"a": "*bf16", "b": "*bf16", "c": "*bf16", "K": "i32"}

    def product(name: str, m: int, n: int, d: int, warps: int, stages: int) -> Compiled:
        return Compiled(
            name,
            product_kernel,
            pointers,
            {"M": m, "N": n, "D": d},
            ("a", "b", "c", "K"),
            warps,
            stages,
            matmul=True,
        )

    yield product("good", 128, 128, 64, 8, 3)
    yield product("spills", 128, 256, 64, 4, 2)
    yield product("too much shared memory", 128, 256, 128, 8, 4)
    yield product("no wgmma", 32, 64, 64, 4, 2)
    # 139 registers are needed
    numbers = {"M": 128, "N": 64, "num_warps": 8, "num_stages": 2, "maxnreg": 128}
    row = Row("attention forward", 90, {"d": 128, "kind": "causal"}, numbers)
    (causal,) = tune.compiled(row, 90, whole=False)
    yield replace(causal, name="serialised")
    yield Compiled("does not compile", wrong_kernel, {"a": "*fp32"}, {"N": 16})
    yield Compiled("kills the compiler", Deadly(), {}, {})
    yield product("good after it", 64, 64, 64, 4, 2)
