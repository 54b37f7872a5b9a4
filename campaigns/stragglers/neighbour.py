"""A neighbour on the same machine: computes in bursts of up to three seconds until it is ended.

neighbour.py SEED
"""

from __future__ import annotations

import random
import sys
import time


def main(seed: int) -> None:
    """Bursts and pauses of random lengths."""
    generator = random.Random(seed)
    while True:
        until = time.monotonic() + generator.uniform(0.05, 3)
        while time.monotonic() < until:
            sum(range(10_000))
        time.sleep(generator.uniform(0, 2))


if __name__ == "__main__":
    main(int(sys.argv[1]))
