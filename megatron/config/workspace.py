"""How many bytes temporaries may take: read by what makes them and by the plan that counts them."""

from __future__ import annotations

# Largest temporary in which a weight gradient is formed, or summed up with others.
SCRATCH_BYTES = 8 << 20

# What a reduce-scatter takes on Gloo for what is received, cast and summed: half of what is
# reduced, or this where that is less; ZeRO allows it half the largest layer's gradient where that
# is more.
ROUND_BYTES = 8 << 20

# Logits widened and exponentiated at once: a CPU core's cache; a GPU wants few launches.
LOSS_CHUNK_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}

# Logits made at once: hundreds of tokens on a CPU, thousands on a GPU, so that the weight and its
# gradient, which are read and written for each chunk, cost little compared with the GEMMs.
HEAD_CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}

# Counters of random words computed at once, and the bytes of one (six of int64). On a CPU for each
# thread (torch gives a thread no less), whose part of the working set stays in its core's cache; a
# GPU wants few launches instead.
DROPOUT_COUNTERS = {"cpu": 1 << 15, "cuda": 1 << 22}
