from __future__ import annotations

import pytest
import torch

from tokenspeed.kernels import norms as reference
from tokenspeed.kernels.triton import norms as kernels


@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (5, 80), (2, 3, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x, residual = torch.randn(2, *shape, dtype=dtype, device=device)
    weight = torch.randn(shape[-1], dtype=dtype, device=device)
    # The interpreter truncates to bfloat16.
    tolerance = {"rtol": 1e-5 if dtype == torch.float32 else 2**-6, "atol": 1e-6}
    torch.testing.assert_close(
        kernels.gemma_rms_norm(x, weight, 1e-6), reference.gemma_rms_norm(x, weight, 1e-6), **tolerance
    )
    got, expected = (module.add_rms_norm(x, residual, weight, 1e-6) for module in (kernels, reference))
    torch.testing.assert_close(got[0], expected[0], **tolerance)
    torch.testing.assert_close(got[1], expected[1], **tolerance)


def test_strided_input(device: torch.device) -> None:
    wide = torch.randn(4, 100, device=device)
    residual = torch.randn(4, 64, device=device)
    weight = torch.randn(64, device=device)
    x = wide[:, 20:84]
    torch.testing.assert_close(
        kernels.add_rms_norm(x, residual, weight, 1e-6)[0], reference.add_rms_norm(x, residual, weight, 1e-6)[0]
    )
