"""The pretended device knows every operator that torch documents as raising in deterministic mode.
That it raises is shown by a fault of test_runs.py.
"""

from __future__ import annotations

import re

import pytest
import torch
from pretended.nondeterministic import OPERATORS, RAISES, raises

ATEN = torch.ops.aten
X = torch.ones(4)


def test_what_torch_documents_is_known():
    text = torch.use_deterministic_algorithms.__doc__
    listed = text.split("operations will throw a")[1].split("In addition")[0]
    names = {name.split(".")[-1] for name in re.findall(r"\* :\w+:`([\w.]+)`", listed)}
    assert len(names) > 20 and names <= set(RAISES)
    assert all(hasattr(ATEN, name) or hasattr(ATEN, f"{name}_") for name in OPERATORS)


@pytest.mark.parametrize(
    "function, args, kwargs, expected",
    [
        (ATEN.cumsum.default, (X, 0), {}, True),
        (ATEN.cumsum.default, (X.long(), 0), {}, False),
        (ATEN.median.dim, (X, 0), {}, True),
        (ATEN.median.default, (X,), {}, False),
        (ATEN.index_add.default, (X, 0, X.long(), X), {}, False),
    ],
)
def test_whether_a_call_raises_depends_on_its_arguments(function, args, kwargs, expected):
    assert raises(function, args, kwargs) == expected
