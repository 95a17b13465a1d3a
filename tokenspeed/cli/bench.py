"""`tokenspeed bench`: how fast an engine or a server is, beside what the machine allows."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tokenspeed.bench.agentic import Report, Row, Workload, measure
from tokenspeed.bench.bound import read_bandwidth
from tokenspeed.bench.decode import AGREEMENT, DecodeBench, DecodeFigures
from tokenspeed.bench.driver import BenchError
from tokenspeed.bench.in_process import EngineTarget
from tokenspeed.bench.servers import Api, ServerTarget, connect
from tokenspeed.cli.errors import CommandError
from tokenspeed.cli.loading import LoadingBar
from tokenspeed.cli.running import engine_config
from tokenspeed.cli.text import printable
from tokenspeed.config.model import ModelError
from tokenspeed.engine.core import EngineCore
from tokenspeed.engine.memory import usable_device

CHECKED_CONTEXT = 256
WIDTH = 110
"""Of tables that do not go to a terminal."""


def decode(
    model: str | None, *, contexts: Sequence[int], batch: int, tokens: int, output: Path | None, **settings: Any
) -> None:
    """Print steps a second at each of `contexts` tokens, of `batch` sequences at once.

    Raises:
        CommandError: the model cannot be loaded, or the engine's answers are not what they must be.
    """
    console = _console()
    with _refusals():
        bandwidth = _bandwidth(**settings)
        core = _engine(model, max_sequences=batch, **settings)
        bench = DecodeBench(core, bandwidth)
        room, longest = core.info.max_context, max(contexts)
        more = bench.output_tokens([longest] * batch, tokens)
        if longest + more > room:
            raise CommandError(
                f"a context of {longest:,} and {more} tokens more do not fit into this engine's {room:,}"
            )
        difference = bench.check(min(CHECKED_CONTEXT, *contexts))
        figures = [(context, bench.decode([context] * batch, tokens)) for context in contexts]
    console.print(_served(core), markup=False)
    console.print(_stream(bandwidth), markup=False)
    console.print(
        f"gate passed: log-probabilities of decode and prefill differ by {difference:.4f} ({AGREEMENT} is allowed)",
        markup=False,
    )
    console.print(decode_table(figures, batch, on_cpu=core.info.device.startswith("cpu")))
    if output is not None:
        rows = [{"context": context, "batch": batch, **asdict(figure)} for context, figure in figures]
        about = {"model": core.info.model, "device": core.info.device, "read_bandwidth": bandwidth}
        _write(output, {**about, "rows": rows})


def decode_table(figures: Sequence[tuple[int, DecodeFigures]], batch: int, on_cpu: bool) -> Table:
    """A row for each context. On a CPU the host is the device, so it has no time of its own."""
    table = _table(
        f"decode, {batch} at once", "context", "tokens/s", "bound", "share", "experts/layer", "step ms", "host ms"
    )
    for context, figure in figures:
        table.add_row(
            f"{context:,}",
            f"{figure.tokens_per_s:,.1f}",
            f"{figure.bound:,.1f}",
            f"{figure.tokens_per_s / figure.bound:.1%}",
            f"{figure.experts:.1f}" if figure.experts else "–",
            f"{figure.step_s * 1e3:.2f}",
            "–" if on_cpu else f"{figure.cpu_s * 1e3:.2f}",
        )
    return table


def agentic(
    model: str | None,
    *,
    workload: Workload,
    url: str | None,
    api: Api,
    api_key: str | None,
    output: Path | None,
    **settings: Any,
) -> None:
    """Print the turns of the agentic workload, and what of them came from the cache.

    Raises:
        CommandError: the model cannot be loaded, the server does not answer, or the gate failed.
    """
    console = _console()
    bench: DecodeBench | None = None
    with _refusals():
        if url is None:
            bandwidth = _bandwidth(**settings)
            core = _engine(model, max_sequences=workload.conversations, **settings)
            if workload.longest > core.info.max_context:
                raise CommandError(
                    f"a conversation comes to {workload.longest:,} tokens, and this engine's contexts to "
                    f"{core.info.max_context:,}; give a smaller --context, or --cache"
                )
            about = _served(core)
            bench = DecodeBench(core, bandwidth)
            report = measure(EngineTarget(core), workload)
        else:
            connection = connect(url, api, api_key, model)
            try:
                # Other digits each time: a server may remember the last.
                salted = replace(workload, salt=secrets.randbits(64))
                about = f"{url} by its {api} API"
                report = measure(ServerTarget(connection), salted)
            finally:
                connection.close()
    console.print(printable(about), markup=False)
    console.print(f"cache at the start: {report.cache_at_start}", markup=False)
    console.print("gate passed: prompts, tokens computed and generated, the first turn asked twice", markup=False)
    if bench is not None:
        console.print(_stream(bench.bandwidth), markup=False)
    console.print(agentic_table(report, bench if workload.conversations == 1 else None))
    for line in summary(report):
        console.print(line, markup=False)
    if output is not None:
        content = {"target": about, **report.as_dict()}
        if bench is not None and workload.conversations == 1:
            content["read_bandwidth"] = bench.bandwidth
            for row, shown in zip(report.rows, content["rows"], strict=True):
                shown["tokens_per_s_bound"] = _bound_per_s(bench, row)
        _write(output, content)


def agentic_table(report: Report, bench: DecodeBench | None = None) -> Table:
    """A row for each turn: counts of the first conversation, medians of all in what is timed. With `bench`, of the
    engine that took one conversation, the tokens a second that its bytes allow beside those it made."""
    many = report.workload.conversations > 1
    title = f"agentic workload, {report.workload.conversations} side by side" if many else "agentic workload"
    table = _table(title, "turn", "prompt", "new", "reused", "computed", "output", "TTFT ms", "ITL ms", "tokens/s")
    if bench is not None:
        table.add_column("bound", justify="right")
    for turn in range(1, report.workload.turns + 1):
        rows = report.of_turn(turn)
        first = rows[0]
        answer = first.answer
        table.add_row(
            str(turn),
            f"{answer.prompt:,}",
            f"{first.new:,}",
            "–" if answer.reused is None else f"{answer.reused:,}",
            "–" if answer.computed is None else f"{answer.computed:,}",
            f"{answer.output:,}",
            _median(rows, lambda row: row.answer.ttft_s * 1e3, 1),
            _median(rows, lambda row: row.answer.itl_s and row.answer.itl_s * 1e3, 2),
            _median(rows, lambda row: row.answer.tokens_per_s, 1),
            *([] if bench is None else [f"{_bound_per_s(bench, first):,.1f}"]),
        )
    return table


def summary(report: Report) -> Iterator[str]:
    """The figures of all turns together."""
    rate, bound = report.hit_rate, report.hit_rate_bound
    if rate is None:
        yield f"hit rate: the server does not say what it reused; the bound is {bound:.2%}"
    else:
        yield f"hit rate: {rate:.2%} of the prompts came from the cache; the bound is {bound:.2%}"
    if report.first_reused is not None:
        yield f"a first turn reused at most {report.first_reused} tokens"
    if report.tokens_per_s is not None:
        yield f"a conversation that generates: {report.tokens_per_s:,.1f} tokens/s"
    yield f"all together, prefills included: {report.total_per_s:,.1f} tokens/s over {report.seconds:.1f} s"


def _bound_per_s(bench: DecodeBench, row: Row) -> float:
    """Tokens a second, half-way through the answer."""
    return 1 / bench.step_bound_s(row.answer.prompt + row.answer.output // 2)


def _median(rows: Sequence[Row], of: Callable[[Row], float | None], digits: int) -> str:
    values = [value for value in map(of, rows) if value is not None]
    return f"{median(values):,.{digits}f}" if values else "–"


def _bandwidth(*, device: str, threads: int, **_: Any) -> float:
    """Before the engine takes the memory."""
    place = usable_device(device)
    if threads:
        torch.set_num_threads(threads)
    rate = read_bandwidth(place)
    if place.type == "cuda":
        torch.cuda.empty_cache()
    return rate


def _stream(bandwidth: float) -> str:
    return f"read-only stream: {bandwidth / 1e9:,.1f} GB/s; a bound on tokens/s is a step's bytes at that rate"


def _engine(model: str | None, *, cache: int | None, **settings: Any) -> EngineCore:
    config = engine_config(model, cache_bytes=cache, **settings)
    with LoadingBar(model or "tokenspeed-pocket") as bar:
        return EngineCore(config, progress=bar)


def _served(core: EngineCore) -> str:
    return f"{core.info.model} ({core.info.device}, {core.info.dtype}) in this process"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _console() -> Console:
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH, soft_wrap=True)


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from None


@contextmanager
def _refusals() -> Iterator[None]:
    """What forbids a measurement, in one line."""
    try:
        yield
    except BenchError as error:
        raise CommandError(f"nothing was measured: {error}") from None
    except (ModelError, ValueError) as error:
        raise CommandError(str(error)) from None
