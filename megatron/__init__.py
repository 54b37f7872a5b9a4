"""Pretraining of GPT models under tensor, sequence, pipeline, context and data parallelism."""

import os

__version__ = "0.1.0"

# `kernels/` stays a top-level folder but is imported as `megatron.kernels`, because PyPI has
# another package `kernels`. Programs of tools/ and benchmarks/ are imported in this way as well:
# other projects install packages of these names.
_checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.exists(os.path.join(_checkout, "kernels", "philox.py")):
    __path__.append(_checkout)
