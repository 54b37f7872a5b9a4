"""Published rows and predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron.tools._plan.rows import read_rows
from megatron.tools._plan.validate import percentile, predict_row, score, spearman

from megatron.config.errors import UserError
from tools.plan import run

HEAD = (
    "source,model,layers,hidden,heads,kv_heads,ffn,vocab,seq,tp,pp,vp,dp,gpus,global_batch,"
    "sharding,recompute,precision,tflops_per_gpu,tokens_per_s_per_gpu,gpu,micro_batch,cp,step_s,"
    "note"
)
LLAMA = "x,8B,32,4096,32,8,14336,128256,8192,"
ROWS = [
    LLAMA + "1,1,1,4,8,128,zero1,none,bf16,527.9,10256,H100-80-SXM,1,2,12.78,",
    LLAMA + "2,1,1,4,8,128,zero1,none,bf16,,9000,H100-80-SXM,1,1,,",
    LLAMA + "3,1,1,4,8,128,zero1,none,bf16,,9000,H100-80-SXM,1,1,,",
    "x,13B,40,5120,40,40,13824,128000,8192,1,1,1,64,64,512,zero1,none,bf16,,1500,A100-80-SXM,4,1,,",
]


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text("# a remark\n" + "\n".join([HEAD, *ROWS]) + "\n")
    return path


def test_every_row_has_an_answer_in_order(file, tmp_path):
    out = tmp_path / "out.json"
    text = run("validate", [str(file), "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [set(row) == {"refused"} for row in rows] == [False, False, True, False]
    assert rows[0]["step_s"] == pytest.approx(12.78, rel=0.25)
    assert rows[0]["tokens_per_s_per_gpu"] == pytest.approx(128 * 8192 / rows[0]["step_s"] / 8)
    assert rows[3]["fits"] == "no" and rows[0]["fits"] in ("yes", "tight")
    assert "num-attention-heads" in rows[2]["refused"] or "divisible" in rows[2]["refused"]
    assert any(line.strip().endswith("all") for line in text)


def test_columns_may_be_named_in_a_remark(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("# about\n# " + HEAD + "\n" + ROWS[0] + "\n")
    assert read_rows(path) == [dict(zip(HEAD.split(","), ROWS[0].split(","), strict=True))]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="no line names the columns"):
        read_rows(path)


def test_measures_of_a_group(file):
    first = predict_row(read_rows(file)[0])
    found = score("one", [first])
    assert found.mean == pytest.approx(abs(first.error)) and found.constant == 0
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert percentile([1, 2, 3, 4, 5], 0.9) == pytest.approx(4.6)
