"""In deterministic mode an operator of the pretended device raises by its arguments. A fault of
test_runs.py shows that a run ends with the error.
"""

import pytest
import torch
from pretended.device import check_deterministic

ATEN = torch.ops.aten
X = torch.ones(4)


def test_operators_that_raise_by_their_arguments():
    for function, args in ((ATEN.cumsum.default, (X, 0)), (ATEN.median.dim, (X, 0))):
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            check_deterministic(function, args, {})
    check_deterministic(ATEN.cumsum.default, (X.long(), 0), {})
    check_deterministic(ATEN.median.default, (X,), {})
    check_deterministic(ATEN.index_add.default, (X, 0, X.long(), X), {})
