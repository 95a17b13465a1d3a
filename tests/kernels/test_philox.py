from __future__ import annotations

import pytest
import torch

from tokenspeed.kernels.philox import philox4x32

# Random123's known answers for philox4x32-10: counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[torch.Tensor]:
    return [torch.tensor([int(word, 16)]) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_known_answers(counter: str, key: str, output: str) -> None:
    c0, c1, c2, c3 = words(counter)
    k0, k1 = words(key)
    assert [f"{int(word):08x}" for word in philox4x32((c0, c1, c2, c3), (k0, k1))] == output.split()


def test_words_broadcast() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    alone = [philox4x32((torch.tensor([n]), zero, zero, zero), (zero + 7, zero))[0] for n in range(5)]
    together = philox4x32((torch.arange(5), zero, zero, zero), (zero + 7, zero))[0]
    assert together.tolist() == [int(word) for word in alone]
