"""What is logged of routers are means over all tokens, whatever the loss leaves out."""

from __future__ import annotations

import json
import random

import pytest
from megatron.tools import preprocess_data
from parity.worker import Outcome, run_case

FLAGS = """--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1e-3
--micro-batch-size 2 --global-batch-size 4 --train-iters 1 --eval-iters 0 --fp64 --clip-grad 0
--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 8 --hidden-dropout 0 --attention-dropout 0
--tokenizer-type NullTokenizer --vocab-size 30 --log-interval 1 --disable-bias-linear""".split()
MASKED = "--eod-mask-loss"
LOSSES = {
    "aux_loss": "load-balancing-loss",
    "seq_aux_loss": "seq-load-balancing-loss",
    "global_aux_loss": "global-load-balancing-loss",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """Documents of 4 tokens, the end of document among them: a mask leaves out one of four."""
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(1)
    texts = [" ".join(str(draw.randrange(30)) for _ in range(3)) for _ in range(100)]
    (folder / "a").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    given = f"--input {folder}/a --output-prefix {folder}/x --append-eod --workers 1"
    flags = [*given.split(), *FLAGS[FLAGS.index("--tokenizer-type") :][:4]]
    preprocess_data.preprocess(preprocess_data.parser().parse_args(flags))
    return f"{folder}/x_text_document"


def ran(data: str, *flags: str) -> Outcome:
    return run_case((*FLAGS, "--data-path", data, "--split", "100,0,0", *flags))


@pytest.mark.parametrize("kind", LOSSES)
def test_forced_balance_is_logged_as_one(data, kind):
    """c_i = k T / E of each expert, so that E / (k T) sum_i c_i sum_t p_ti is the T tokens, of
    which the mean is 1.
    """
    flags = f"--moe-router-force-load-balancing --moe-router-load-balancing-type {kind}"
    found = ran(data, MASKED, *flags.split(), "--moe-aux-loss-coeff", "1e-2").metrics[-1]
    assert found[LOSSES[kind]] == pytest.approx(1, abs=1e-12)
    assert found["router-objective"] == pytest.approx(2 * 1e-2, abs=1e-12)  # of two layers
