"""What finding a prompt in the cache costs, by the number of sessions that share its beginning.

    python benchmarks/lookup.py --output benchmarks/results/lookup.json

Every session has a preamble of 4,000 tokens that all share, and 4,000 tokens of its own. The gate is that each lookup
finds its session's whole prompt.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from tokenspeed.cache.prefix_cache import PrefixCache

SHARED = 4000
OWN = 4000
SESSIONS = (10, 100, 1_000, 10_000)
LOOKUPS = 300
PAGE_SIZE = 64


def prompt(preamble: np.ndarray, session: int) -> np.ndarray:
    own = np.random.default_rng(session).integers(0, 200_000, OWN, dtype=np.int32)
    return np.concatenate([preamble, own])


def add(cache: PrefixCache, ids: np.ndarray) -> None:
    """A session's turn: a state at the end of the preamble, and one at its end."""
    cache.turn_over()
    found = cache.find("tenant", ids)
    opening = cache.open("tenant", found, len(ids) + 1, ring=1, reserve=1)
    assert opening is not None
    tail = opening.tail
    if found.state < SHARED:
        cache.checkpoint(tail, ids[:SHARED], shared=False)
    cache.settle(tail)
    cache.close(tail, ids, tail.ring[0], None)


def run() -> list[dict[str, float]]:
    """Rows by number of sessions. Ends the program where a lookup does not find its prompt."""
    preamble = np.random.default_rng(10**9).integers(0, 200_000, SHARED, dtype=np.int32)
    pages = SESSIONS[-1] * (OWN // PAGE_SIZE + 2) + SHARED // PAGE_SIZE + 2
    cache = PrefixCache(pages, 2 * SESSIONS[-1] + 10, PAGE_SIZE)
    rows, held = [], 0
    rng = np.random.default_rng(0)
    for count in SESSIONS:
        for session in range(held, count):
            add(cache, prompt(preamble, session))
        held = count
        cache.turn_over()
        times = []
        for session in rng.integers(0, count, LOOKUPS):
            ids = np.append(prompt(preamble, int(session)), np.int32(1))
            begun = perf_counter()
            found = cache.find("tenant", ids)
            times.append(perf_counter() - begun)
            if (found.kv, found.state) != (SHARED + OWN, SHARED + OWN):
                sys.exit(f"session {session} of {count}: found {found.kv} tokens and a state at {found.state}")
        rows.append({"sessions": count, "median_us": round(median(times) * 1e6, 1)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    options = parser.parse_args()
    rows = run()
    for row in rows:
        print(f"{row['sessions']:>6} sessions: {row['median_us']:>7.1f} µs a lookup")
    ratio = round(rows[-1]["median_us"] / rows[0]["median_us"], 2)
    print(f"{SESSIONS[-1]} sessions cost {ratio} × what {SESSIONS[0]} do")
    if options.output:
        about = {
            "command": "python benchmarks/lookup.py --output benchmarks/results/lookup.json",
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()} CPU",
            "workload": f"prompts of {SHARED} shared + {OWN} own tokens, {LOOKUPS} lookups of random sessions",
            "ratio": ratio,
            "rows": rows,
        }
        options.output.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
