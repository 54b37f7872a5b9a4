"""The budget of one training step: how much a reader, and the host, has to go through. Lower the
numbers when there is room; raise one only with a reason in the same commit.
"""

import subprocess
import sys
from pathlib import Path

FUNCTIONS, FILES, DEPTH, CALLS = 112, 35, 14, 395


def test_one_step_stays_within_its_budget():
    program = Path(__file__).with_name("one_step.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    functions, files, depth, calls = map(int, done.stdout.split())
    assert 50 < functions <= FUNCTIONS and 10 < files <= FILES
    assert 5 < depth <= DEPTH and 200 < calls <= CALLS
