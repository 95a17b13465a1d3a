from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed.kernels.philox import WORD, philox4x32
from tokenspeed.kernels.triton.noise import gumbel_noise, noise_at, philox_word


@triton.jit
def _words_kernel(counters, keys, out, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    c0 = tl.load(counters + i).to(tl.uint32)
    c1 = tl.load(counters + COUNT + i).to(tl.uint32)
    c2 = tl.load(counters + 2 * COUNT + i).to(tl.uint32)
    c3 = tl.load(counters + 3 * COUNT + i).to(tl.uint32)
    k0 = tl.load(keys + i).to(tl.uint32)
    k1 = tl.load(keys + COUNT + i).to(tl.uint32)
    word = philox_word(c0, c1, c2, c3, k0, k1)
    tl.store(out + i, word.to(tl.int64))


@triton.jit
def _noise_kernel(words, out, COUNT: tl.constexpr):
    i = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out + i, gumbel_noise(tl.load(words + i).to(tl.uint32)))


@triton.jit
def _noise_of_rows_kernel(seeds, out, position, ROWS: tl.constexpr, IDS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    ids = tl.arange(0, IDS)[None, :]
    seed = tl.load(seeds + row)
    position = tl.load(position)
    noise = noise_at(seed.to(tl.uint32), (seed >> 32).to(tl.uint32), position, ids)
    tl.store(out + row * IDS + ids, noise)


def test_words_are_those_of_the_reference(device: torch.device) -> None:
    counters, keys = torch.randint(2**32, (4, 256)), torch.randint(2**32, (2, 256))
    counters[:, 0], keys[:, 0] = WORD, WORD
    counters[:, 1], keys[:, 1] = 0, 0
    out = torch.empty(256, dtype=torch.int64, device=device)
    _words_kernel[(1,)](counters.to(device), keys.to(device), out, COUNT=256)
    expected = philox4x32(tuple(counters), tuple(keys))[0]
    assert out.tolist() == expected.tolist()


def test_noise_is_exact_to_4e_6(device: torch.device) -> None:
    count = 2**15
    x = torch.randint(2**24, (count,))
    x[:2048], x[2048:4096] = torch.arange(2048), 2**24 - 1 - torch.arange(2048)
    # Where the formula changes: v = 1/8 and u = 1/2.
    x[4096:4160], x[4160:4224] = 7 * 2**21 - 32 + torch.arange(64), 2**23 - 32 + torch.arange(64)
    out = torch.empty(count, device=device)
    _noise_kernel[(count // 1024,)]((x << 8 | 0xAB).to(device), out, COUNT=1024)
    u = (x.double() + 0.5) * 2.0**-24
    assert float((out.cpu().double() + (-u.log()).log()).abs().max()) < 4e-6


def test_draws_follow_the_distribution(device: torch.device) -> None:
    """χ² of 16,384 draws over seeds, at 11 degrees of freedom: 31.26 is passed by 1 in 1,000."""
    rows, ids = 2**14, 16
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(1))
    noise = torch.empty(rows, ids, device=device)
    position = torch.tensor(2**33 + 5, device=device)
    _noise_of_rows_kernel[(rows // 512,)](seeds.to(device), noise, position, ROWS=512, IDS=ids)
    counts = (logits + noise.cpu()[:, :12]).argmax(1).bincount(minlength=12).double()
    expected = logits.double().softmax(0) * rows
    assert float(((counts - expected).square() / expected).sum()) < 31.26
