"""Kernels in Triton run on the GPU where there is one, and under Triton's interpreter where there is none."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported

pytest.importorskip("triton")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter holds a scalar as an array of one element, which numpy 2.4 no longer takes for an integer."""
    from triton.runtime import interpreter  # after the environment is set

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(autouse=True)
def within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter, no load or store leaves the memory of the tensors that its kernel was given."""
    from triton.runtime import interpreter

    memory: list[tuple[int, int]] = []
    launch, builder = interpreter.GridExecutor._init_args_hst, interpreter.InterpreterBuilder

    def launched(self: Any, args: Any, kwargs: Any) -> Any:
        hosts = launch(self, args, kwargs)
        storages = [arg.untyped_storage() for arg in (*hosts[0], *hosts[1].values()) if isinstance(arg, torch.Tensor)]
        memory[:] = sorted({(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages})
        return hosts

    def check(pointers: Any, mask: Any) -> None:
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(np.int64)
        if addresses.size:
            first, end = np.array(memory).T
            place = np.searchsorted(first, addresses, side="right") - 1
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            assert (place >= 0).all()
            assert (addresses + size <= end[place]).all(), "out of bounds"

    def checked(name: str, at: int, masked: int) -> None:
        function = getattr(builder, name)

        def access(self: Any, *args: Any) -> Any:
            check(args[at], args[masked])
            return function(self, *args)

        monkeypatch.setattr(builder, name, access)

    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", launched)
    checked("create_masked_load", 0, 1)
    checked("create_masked_store", 0, 2)
    checked("create_atomic_rmw", 1, 3)
