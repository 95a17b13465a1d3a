"""Training rows: dialogues of about a given length, encoded, and the worker processes that keep writing them."""

from __future__ import annotations

import multiprocessing as mp
import queue
import random
from pathlib import Path
from typing import Any

import numpy as np

from generate import Dialogue
from render import head, render
from tokenizer import Encoder

LABELS = ["read", "written", "name", "key", "value", "recalled", "quoted", "first"]
SLOTS = 65_536  # token slots a step


def row(encoder: Encoder, seed: int, length: int, most_tools: int, evaluation: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ids and labels `[length]` of one dialogue that fills them, cut at the end or padded with unread zeros."""
    dialogue = Dialogue(seed, evaluation, most_tools)
    count = len(encoder.segments(head(dialogue.schemas, dialogue.system))[0])
    done = 0
    while count < length:
        dialogue.extend()
        fresh = dialogue.messages[done:]
        # Counting each exchange by itself: only its own rendering matters for when to stop.
        count += len(encoder.segments(render([], None, fresh))[0])
        done = len(dialogue.messages)
    keep = not dialogue.values.chance(0.12)
    ids, labels = encoder.segments(render(dialogue.schemas, dialogue.system, dialogue.messages, keep))
    numbers = {label: number for number, label in enumerate(LABELS)}
    tokens, kinds = np.zeros(length, np.uint16), np.zeros(length, np.uint8)
    tokens[: len(ids)] = ids[:length]
    kinds[: len(ids)] = [numbers[label] for label in labels[:length]]
    return tokens, kinds


def lesson(progress: float, draw: random.Random) -> tuple[int, int]:
    """Row length and the most tools a dialogue offers, at a share of the training done."""
    roll = draw.random()
    if progress < 0.3:
        length = 1024
    elif progress < 0.6:
        length = 1024 if roll < 0.6 else 2048
    else:
        length = 1024 if roll < 0.55 else 4096
    most = 3 if progress < 0.12 else 5 if progress < 0.25 else 8
    return length, 8 if draw.random() < 0.2 else most


def batch(
    encoder: Encoder, draw: random.Random, length: int, most_tools: int, evaluation: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Rows that fill one step's slots."""
    rows = [row(encoder, draw.getrandbits(48), length, most_tools, evaluation) for _ in range(SLOTS // length)]
    return np.stack([ids for ids, _ in rows]), np.stack([labels for _, labels in rows])


def work(tokenizer: Path, seed: int, progress: Any, batches: Any) -> None:
    """A worker's life: batches for the progress of the moment, until the process is ended."""
    encoder, draw = Encoder(tokenizer), random.Random(seed)
    while True:
        length, most = lesson(progress.value, draw)
        batches.put(batch(encoder, draw, length, most, evaluation=False))


class Feeder:
    """Worker processes and the queue of their batches."""

    def __init__(self, tokenizer: Path, workers: int, seed: int) -> None:
        context = mp.get_context("fork")
        self.progress = context.Value("d", 0.0)
        self.batches = context.Queue(maxsize=24)
        self.processes = [
            context.Process(target=work, args=(tokenizer, seed * 1000 + i, self.progress, self.batches), daemon=True)
            for i in range(workers)
        ]
        for process in self.processes:
            process.start()

    def next(self, timeout_s: float) -> tuple[np.ndarray, np.ndarray]:
        """The next batch; raises `queue.Empty` when none comes."""
        return self.batches.get(timeout=timeout_s)

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()


__all__ = ["LABELS", "SLOTS", "Feeder", "batch", "lesson", "queue", "row"]
