"""tools/generate.py on a GPU that exists in types only: no tensor of the host meets one of the
device, and for each token the host waits twice, to give the text so far and to read the scores.
"""

from __future__ import annotations

from collections import Counter

from pretended.process import MARKS, found_by
from pretended.train import LLAMA_BF16, TOKENS, Case

from pretrain_gpt import main

pytestmark = MARKS


def test_text_is_written_token_by_token(tmp_path):
    case = Case(LLAMA_BF16, micro_batches=1, iterations=1, evaluations=0, saves=True)
    assert main(case.words(str(tmp_path / "run"))) == 0
    found = found_by("train.py", tmp_path, "--generate", str(tmp_path / "run"))
    assert found["code"] == 0, found["error"]
    waits = Counter(found["waits"])
    assert waits["copy to the device"] >= TOKENS
    assert waits["copy to the host"] == TOKENS
    assert set(waits) == {"copy to the device", "copy to the host"}
