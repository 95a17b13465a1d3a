"""Trains the pocket model on generated dialogues, on one GPU.

    python examples/pocket/train.py --total-s 1040 --call-s 570 --checkpoint /tmp/run.pt --out /tmp/pocket

A run may be cut into calls: each goes on from the checkpoint until `--call-s` seconds have passed, and the learning
rate falls linearly to zero at `--total-s` seconds of training over all calls (compilation not counted).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import Pocket, Shape, config_json, load, save
from muon import Optimizer
from rows import LABELS, Feeder, batch
from tokenizer import Encoder

POCKET = Path(__file__).resolve().parents[2] / "tokenspeed" / "pocket"
WEIGHTS = {
    "read": 0.1,
    "written": 1.0,
    "name": 6.0,
    "key": 6.0,
    "value": 3.0,
    "recalled": 3.0,
    "quoted": 2.0,
    "first": 2.0,
}
DRAFT_WEIGHT = 0.2
BALANCE_WEIGHT = 0.002
SILENCE_S = 150  # a run in which no step has ended for so long exits


def head_loss(hidden: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy; hidden: `[tokens, hidden]`, targets and weights: `[tokens]`."""
    logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
    return (F.cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum()


class Run:
    """The model, its optimizer and how far the training is."""

    def __init__(self, model: Pocket, device: torch.device, muon_lr: float, adam_lr: float) -> None:
        self.model, self.device = model.to(device), device
        self.optimizer = Optimizer(model, muon_lr, adam_lr, decay=0.05)
        self.steps, self.slots, self.seconds = 0, 0, 0.0
        self.weights = torch.tensor([WEIGHTS[label] for label in LABELS], device=device)
        self.loss = head_loss
        if device.type == "cuda":
            for layer in [*model.model.layers, *model.mtp.layers]:
                layer.compile(dynamic=False)
            self.loss = torch.compile(head_loss)

    def tensors(self, ids: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        return (
            torch.from_numpy(ids.astype(np.int64)).to(self.device, non_blocking=True),
            torch.from_numpy(labels.astype(np.int64)).to(self.device, non_blocking=True),
        )

    def losses(self, ids: Tensor, labels: Tensor, draft: bool) -> tuple[Tensor, Tensor]:
        """The language model's loss and what is minimised."""
        weights, embedding = self.weights[labels], self.model.model.embed_tokens.weight
        hidden, balance = self.model(ids)
        loss = self.loss(hidden[:, :-1].flatten(0, 1), embedding, ids[:, 1:].flatten(), weights[:, 1:].flatten())
        total = loss + BALANCE_WEIGHT * balance
        if draft:
            drafts = self.model.draft(ids, hidden)[:, :-2].flatten(0, 1)
            total = total + DRAFT_WEIGHT * self.loss(
                drafts, embedding, ids[:, 2:].flatten(), weights[:, 2:].clamp(max=2.0).flatten()
            )
        return loss.detach(), total

    def step(self, ids: np.ndarray, labels: np.ndarray, scale: float, draft: bool) -> Tensor:
        """One optimizer step; returns the loss, still on the device."""
        loss, total = self.losses(*self.tensors(ids, labels), draft)
        total.backward()
        self.optimizer.step(scale)
        self.steps += 1
        self.slots += ids.size
        return loss

    def scores(self, batches: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
        """Teacher-forced shares of spans predicted right from end to end, by label, and the draft head's agreement."""
        right: dict[str, list[float]] = {label: [] for label in LABELS}
        drafted: list[Tensor] = []
        for ids, labels in batches:
            tokens, _ = self.tensors(ids, labels)
            hidden = self.model(tokens)[0].detach()  # with gradients, so that the compiled layers serve
            best = self.model.logits(hidden).argmax(-1)
            hits = (best[:, :-1] == tokens[:, 1:]).cpu().numpy()
            kinds = labels[:, 1:]
            for row_hits, row_kinds in zip(hits, kinds, strict=True):
                edges = np.flatnonzero(np.diff(row_kinds)) + 1
                for start, end in zip([0, *edges], [*edges, len(row_kinds)], strict=True):
                    kind = LABELS[row_kinds[start]]
                    right[kind].append(
                        row_hits[start:end].all() if kind not in ("read", "written") else row_hits[start:end].mean()
                    )
            draft = self.model.logits(self.model.draft(tokens, hidden)).argmax(-1)[:, :-2]
            spoken = torch.from_numpy(labels[:, 2:] > 0).to(self.device)
            drafted.append((draft == best[:, 1:-1])[spoken].float().mean())
        result = {label: round(float(np.mean(values)), 4) for label, values in right.items() if values}
        return {**result, "mtp": round(torch.stack(drafted).mean().item(), 4)}

    def place(self) -> str:
        """How far the training is, in words."""
        return f"{self.seconds:6.0f} s  step {self.steps}  {self.slots / 1e6:.0f} M slots"

    def store(self, path: Path) -> None:
        """Write the checkpoint beside its place, then move it there."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "slots": self.slots,
            "seconds": self.seconds,
        }
        torch.save(state, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)

    def restore(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.slots, self.seconds = state["steps"], state["slots"], state["seconds"]


class Watchdog:
    """Ends the process when no step has been reported for a while: a hung compilation costs the whole machine."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        while time.monotonic() - self.last < SILENCE_S:
            time.sleep(1)
        print(f"no step for {SILENCE_S} s", flush=True)
        os._exit(3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the pocket model.")
    parser.add_argument("--total-s", type=float, required=True, help="seconds of training over all calls")
    parser.add_argument(
        "--call-s", type=float, required=True, help="seconds after which this call ends, start included"
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="continued if it exists")
    parser.add_argument("--out", type=Path, required=True, help="gets config.json and model.safetensors")
    parser.add_argument("--start", type=Path, help="directory of a model to start from instead of random weights")
    parser.add_argument("--muon-lr", type=float, default=4e-3)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--warm-up", type=int, default=100, help="steps")
    parser.add_argument("--lesson", type=float, help="fixes the curriculum's progress")
    parser.add_argument(
        "--draft-from", type=float, default=0.3, help="share of the training after which the draft head learns"
    )
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report-s", type=float, default=60)
    arguments = parser.parse_args()

    began = time.monotonic()
    random.Random(arguments.seed)
    encoder = Encoder(POCKET / "tokenizer.json")
    feeder = Feeder(POCKET / "tokenizer.json", arguments.workers, arguments.seed + int(time.time()) % 100_000)
    cuda = torch.cuda.is_available()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64
    dtype = torch.bfloat16 if cuda else torch.float32
    model = load(arguments.start, dtype).train() if arguments.start else Pocket(Shape(), dtype)
    run = Run(model, torch.device("cuda" if cuda else "cpu"), arguments.muon_lr, arguments.adam_lr)
    if arguments.checkpoint.exists():
        run.restore(arguments.checkpoint)
    arguments.out.mkdir(parents=True, exist_ok=True)
    config = config_json(model.shape, encoder.control["<|im_end|>"], encoder.control["<|endoftext|>"], 32768)
    (arguments.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    held_out = [batch(encoder, random.Random(99 + i), 1024, 8, evaluation=True) for i in range(2)]
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size:,} parameters, {run.steps} steps done, {time.monotonic() - began:.0f} s to start", flush=True)

    watchdog = Watchdog()
    seen: set[tuple[tuple[int, ...], bool]] = set()
    last_report, recent = time.monotonic(), []
    tick = time.monotonic()
    while time.monotonic() - began < arguments.call_s and run.seconds < arguments.total_s:
        progress = run.seconds / arguments.total_s
        feeder.progress.value = arguments.lesson if arguments.lesson is not None else progress
        ids, labels = feeder.next(60)
        draft = progress >= arguments.draft_from
        scale = min(1.0, (run.steps + 1) / arguments.warm_up) * (1 - progress)
        recent.append(run.step(ids, labels, scale, draft))
        if run.steps % 10 == 0 or (ids.shape, draft) not in seen:
            recent[-1].item()
            watchdog.last = time.monotonic()
        now = time.monotonic()
        if (ids.shape, draft) in seen:
            run.seconds += now - tick  # the first step of a shape is compilation
        else:
            print(f"step {run.steps}: first of {ids.shape} after {now - tick:.1f} s", flush=True)
        seen.add((ids.shape, draft))
        tick = now
        if now - last_report > arguments.report_s or run.steps in (50, 200):
            loss = torch.stack(recent).mean().item()
            rate = len(recent) * ids.size / (time.monotonic() - last_report) / 1e3
            print(f"{run.place()}  {rate:.0f} K/s  loss {loss:.4f}  {run.scores(held_out)}", flush=True)
            run.store(arguments.checkpoint)
            save(model, arguments.out / "model.safetensors")
            last_report, recent, tick = time.monotonic(), [], time.monotonic()
    feeder.stop()
    run.store(arguments.checkpoint)
    save(model, arguments.out / "model.safetensors")
    print(f"{run.place()}  {run.scores(held_out)}", flush=True)


if __name__ == "__main__":
    main()
