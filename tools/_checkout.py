"""Puts the root of the checkout on the path of a tool that is run as a file.

Python gives such a tool its own folder only, and `megatron` lies above it. An installed command
finds `megatron` by itself: it never imports this module, and an installation does not have it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
