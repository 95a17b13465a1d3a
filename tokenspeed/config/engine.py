"""What an engine is started with."""

from __future__ import annotations

from typing import Literal

import msgspec

Dtype = Literal["auto", "float32", "float64", "bfloat16"]
LoadFormat = Literal["auto", "dummy"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of one engine.

    Attributes:
        model: a Hugging Face model directory, or a repository id.
        device: torch's name of it; `auto` is a GPU where there is one, else the CPU.
        dtype: of weights and KV; `auto` is float32 on a CPU, else bfloat16.
        load_format: `dummy` draws random weights from the config alone.
        page_size: token rows in a KV page; None is 16 on a CPU, else 64.
        cache_bytes: memory for KV pages and state rows together; None is 1 GiB on a CPU, else what the device has free
            once the weights are there, less a reserve for what a step computes.
        pages, rows: explicit sizes (sinks included), instead of the division of `cache_bytes`.
        max_sequences: turns that run side by side.
        prefill_chunk: prompt tokens computed in one step, over all turns; None is 512 on a CPU, else 8192, since a
            chunk of more than about a hundred tokens reads all the weights whatever its length.
        depth: steps in flight before a step's result is read; None is 0 on a CPU (where a step runs at once), else 1,
            which is also the least there.
        max_context: bound on prompt + output; None is the model's own. It is lowered to what the pages hold.
        max_queue: turns waiting; one more is refused with `queue_full`.
        prefix_cache: reuse what is cached of a prompt; without it every turn computes its whole prompt.
        forced_tokens: allow turns that say which ids their output begins with (`SamplingParams.forced_token_ids`).
        junction_tokens: where a prompt shares so many tokens or more beyond the last state kept of them, one is kept
            at the point where they part; and a turn waits for another that is just computing them.
        checkpoint_interval: in a long prompt, a state is kept every so many tokens as long as rows are free.
        shared_prefixes: ids (little-endian int32) that every tenant may reuse, computed at start.
        seed: of dummy weights.
        threads: CPU threads of torch; 0 leaves torch's choice.
    """

    model: str
    device: str = "cpu"
    dtype: Dtype = "auto"
    load_format: LoadFormat = "auto"
    page_size: int | None = None
    cache_bytes: int | None = None
    pages: int | None = None
    rows: int | None = None
    max_sequences: int = 8
    prefill_chunk: int | None = None
    depth: int | None = None
    max_context: int | None = None
    max_queue: int = 256
    prefix_cache: bool = True
    forced_tokens: bool = False
    junction_tokens: int = 1024
    checkpoint_interval: int = 8192
    shared_prefixes: tuple[bytes, ...] = ()
    seed: int = 0
    threads: int = 0

    def steps(self, device_type: str) -> StepSettings:
        """What is None filled in for a kind of device (`torch.device.type`). Raises ValueError where that kind cannot
        do as the settings say."""
        cpu = device_type == "cpu"
        depth = self.depth if self.depth is not None else 0 if cpu else 1
        if depth < 1 and not cpu:
            raise ValueError(f"depth is {depth}; on {device_type} it is at least 1")
        return StepSettings(
            page_size=self.page_size or (16 if cpu else 64),
            prefill_chunk=self.prefill_chunk or (512 if cpu else 8192),
            depth=depth,
        )


class StepSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`EngineConfig`'s fields of these names, for one kind of device."""

    page_size: int
    prefill_chunk: int
    depth: int
