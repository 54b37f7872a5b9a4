"""Published rows and predictions, and how other programs are planned."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from megatron.tools._plan.hardware import write_hardware
from megatron.tools._plan.operations import Operations
from megatron.tools._plan.program import Program
from megatron.tools._plan.rows import program_of, read_rows, row_flags
from megatron.tools._plan.validate import percentile, predict_row, score, spearman
from megatron.tools._plan.work import Exchange
from step_models import DENSE, H100, TOKENS, VOCABULARY, resolved

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


def test_rows_are_held_against_constants_that_are_given(file, tmp_path):
    """Those of devices of their type."""
    out, mine = tmp_path / "out.json", tmp_path / "mine.json"
    slow = dataclasses.replace(H100, product_efficiency=H100.product_efficiency / 2)
    write_hardware(mine, slow, {})
    steps = []
    for more in ([], ["--hardware", str(mine)]):
        run("validate", [str(file), "--out", str(out), *more])
        steps.append([row.get("step_s") for row in json.loads(out.read_text())["rows"]])
    shipped, given = steps
    assert given[0] > 1.3 * shipped[0] and given[3] == shipped[3]
    with pytest.raises(UserError, match="--hardware b200: no row that can be predicted ran on"):
        run("validate", [str(file), "--hardware", "b200"])


def test_measures_of_a_group(file):
    first = predict_row(read_rows(file)[0])
    found = score("one", [first])
    assert found.mean == pytest.approx(abs(first.error)) and found.constant == 0
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert percentile([1, 2, 3, 4, 5], 0.9) == pytest.approx(4.6)


# ---- other programs


def test_whole_logits_are_gathered():
    config = resolved(f"{DENSE} --tensor-model-parallel-size 2")
    operations = Operations(config, VOCABULARY, Program(whole_logits=True))
    gather = Exchange("all-gather", "tp", 2 * TOKENS * operations.vocab * 2)
    assert gather in operations.head().forward.exchanges


def test_a_row_is_planned_as_the_program_that_ran_it():
    row = {
        "source": "Aleph-Alpha/x", "layers": "40", "hidden": "5120", "heads": "40",
        "kv_heads": "40", "ffn": "13824", "vocab": "128000", "seq": "8192", "tp": "1", "pp": "4",
        "gpus": "64", "global_batch": "512", "kernels": "FlashAttention-2, unfused RMSNorm",
    }  # fmt: skip
    assert program_of(row) == Program(
        whole_logits=True, gathered_inputs=True, activated_gate=True, normed=True, serial=True
    )
    assert not program_of(row | {"kernels": "fused RMSNorm kernel"}).normed
    assert program_of(row | {"source": "elsewhere"}) == Program(normed=True)
    flags, _ = row_flags(row)
    layout = flags[flags.index("--pipeline-model-parallel-layout") + 1]
    # 13.0 billion parameters of 40 layers, and 0.66 of each matrix
    assert [stage.count("t") for stage in layout.split("|")] == [9, 11, 11, 9]
    assert layout.startswith("E") and layout.endswith("L")
    # by its bound of six layers alone, 14 stages would do
    row |= {"layers": "80", "hidden": "8192", "heads": "64", "kv_heads": "64", "ffn": "22016"}
    flags, _ = row_flags(row | {"pp": "16"})
    stages = flags[flags.index("--pipeline-model-parallel-layout") + 1].split("|")
    assert len(stages) == 16 and all(stages) and sum(each.count("t") for each in stages) == 80
