from __future__ import annotations

import inspect

from tokenspeed.kernels.registry import Operators, implementations
from tokenspeed.kernels.triton.table import TABLE


def test_every_operator_is_there_with_its_own_signature() -> None:
    assert TABLE.keys() == implementations().keys()
    for name, function in TABLE.items():
        ours, theirs = (inspect.signature(one).parameters for one in (function, getattr(Operators, name)))
        assert list(ours)[: len(theirs)] == list(theirs) or list(theirs)[: len(ours)] == list(ours), name
