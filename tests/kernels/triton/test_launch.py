from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def copy_kernel(source, target, count, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, mask=place < count, other=0.0), mask=place < count)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's accesses are watched")
@pytest.mark.parametrize(("held", "written"), [(7, 8), (8, 7)])
def test_an_access_out_of_bounds_is_seen(held: int, written: int) -> None:
    source, target = torch.randn(held), torch.zeros(written)
    copy_kernel[(1,)](source, target, 7, BLOCK=8)
    assert torch.equal(target[:7], source[:7])
    with pytest.raises(triton.runtime.errors.InterpreterError):
        copy_kernel[(1,)](source, target, 8, BLOCK=8)
