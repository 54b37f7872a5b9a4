"""The table of configurations: every row is compiled, a GPU gets its own or an older one's, and one
that lacks what a row needs is refused.
"""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from megatron.kernels import configurations
from megatron.kernels.attention import unsupported_heads
from megatron.kernels.attention_launch import Options, configuration
from megatron.kernels.configurations import FILE, Row, find, index, read
from megatron.kernels.tools import manifest as gate
from megatron.kernels.tools import shipped, tune
from megatron.kernels.tools.shipped import compilations

ROWS = read(FILE.read_text())


def dead(rows, compiled):
    """Rows of the table that nothing is compiled from."""
    used = [each.row for each in compiled if each.row is not None]
    return [row for row in rows if not row.refused and row not in used]


def facts(compiled):
    return compiled.constants, compiled.num_warps, compiled.num_stages, compiled.options


def test_every_row_is_compiled_and_none_of_its_numbers_is_dead():
    known = gate.rows()
    compiled = list(known.values())
    assert all(each.row is not None for each in compiled) and dead(ROWS, compiled) == []
    assert {each.arch for each in compiled} == set(configurations.ARCHITECTURES)
    stray = replace(ROWS[0], key={"kind": "unused"})
    assert dead([*ROWS, stray], compiled) == [stray]
    # each number, halved, changes what is compiled
    for row in {each.row.operator: each.row for each in reversed(compiled)}.values():
        prefix = "" if row.arch == 90 else f"sm_{row.arch} "
        family = "attention gluon" if "gluon" in row.operator else row.operator.split()[0]
        for name in row.numbers:
            changed = replace(row, numbers=row.numbers | {name: row.numbers[name] // 2})
            with tune.using(changed):
                new = (each for each in compilations(row.arch, family) if each.row == changed)
                changes_grid = name in ("programs", "warps")
                differ = (
                    changes_grid or facts(each) != facts(known[prefix + each.name]) for each in new
                )
                assert any(differ), (row, name)


def test_every_launch_has_a_name(monkeypatch):
    call = ("one of two",), "dropout", "bfloat16", {"s": 64, "b": 1, "width": 64}
    monkeypatch.setattr(shipped, "FAMILIES", {"dropout": lambda arch: [call]})
    with pytest.raises(ValueError, match="argument 2 is longer"):
        list(compilations(family="dropout"))


def test_types_and_alignment_are_tritons():
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend
    from triton.tools.tensor_descriptor import TensorDescriptor

    block = TensorDescriptor.from_tensor(torch.empty(64, 64, dtype=torch.bfloat16), [16, 32])
    off = torch.frombuffer(bytearray(72), dtype=torch.int32, offset=4)
    values = [block, off, 0.5, False, True, 3, 48, (1 << 31) - 1, 1 << 31, -(1 << 31), -(1 << 40)]
    for dtype, device in itertools.product(shipped.TYPES, ("cpu", "meta")):
        tensor = torch.empty(16, dtype=dtype, device=device)
        values += [tensor, tensor[1:]]
    for value in values:
        kind, key = native_specialize_impl(BaseBackend, value, False, True, True)
        assert shipped._type(value) == kind, value
        assert shipped._is_divisible(value) == (key == "D"), value


def test_a_refused_row_says_why_and_is_one_that_attention_looks_up():
    for row in ROWS:
        assert bool(row.refused) != bool(row.numbers)
        assert row.arch in configurations.ARCHITECTURES
        if row.refused:
            kind, kernel = row.key["kind"], row.operator.removeprefix("attention ")
            given = {"dropout": {"drop": 0.1}, "softcap": {"softcap": 50.0}}.get(kind, {})
            call = kernel, row.key["d"], Options(1.0, **given), kind == "causal"
            with pytest.raises(ValueError, match="on compute capability"):
                configuration(*call, arch=row.arch)


def test_what_rows_accept_is_what_their_kernels_need():
    """Spills and shared memory are the most of the manifest's, no byte more; products that wait for
    each other are excused where there are some.
    """
    manifest = json.loads(gate.MANIFEST.read_text())["3.6.0"]
    need: dict[int, list[dict]] = {}
    for name, each in gate.rows().items():
        need.setdefault(ROWS.index(each.row), []).append(manifest[name])
    for at, facts in need.items():
        assert ROWS[at].spills == max(each["spilled"] for each in facts), ROWS[at]
        assert bool(ROWS[at].serialised) == any(each["serialised"] for each in facts), ROWS[at]
        if ROWS[at].shared:  # its operator asks whether a GPU has as much
            assert ROWS[at].shared == max(each["shared"] for each in facts), ROWS[at]
        else:
            assert max(each["shared"] for each in facts) <= min(
                configurations.SHARED_MEMORY.values()
            ), ROWS[at]


def test_the_newest_row_that_is_not_newer(monkeypatch):
    rows = [Row("op", arch, {"d": 64}, {"M": arch}) for arch in (90, 80)]
    monkeypatch.setattr(configurations, "TABLE", index(rows))
    for arch, taken in ((80, 80), (86, 80), (89, 80), (90, 90), (100, 90), (120, 90)):
        assert find("op", arch, d=64).arch == taken
    with pytest.raises(ValueError):
        find("op", 75, d=64)
    with pytest.raises(KeyError):
        find("op", 90, d=128)
    with pytest.raises(ValueError, match="two rows of op"):
        index([*rows, rows[0]])


def test_a_gpu_without_the_shared_memory_is_refused():
    row = Row("attention forward", 80, {"d": 64, "kind": "full"}, {"M": 64}, shared=120 << 10)
    assert row.unsupported_reason(80) is None and row.unsupported_reason(90) is None
    assert "needs 120 KiB of shared memory" in row.unsupported_reason(86)
    assert unsupported_heads(128) is None and unsupported_heads(128, 90, softcap=50.0) is None
    assert "no multiple of 8 up to 256" in unsupported_heads(260)
    assert "a GPU of compute capability 12.0 has 99" in unsupported_heads(256, 120)
    assert unsupported_heads(256, 120, torch.float32) is None


def test_the_file_is_a_row_a_line():
    assert tune.write(ROWS) == FILE.read_text()
