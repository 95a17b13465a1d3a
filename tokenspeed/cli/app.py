"""The commands and their options."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer

import tokenspeed
from tokenspeed.cli.errors import CommandError, one_line

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(no_args_is_help=True, help="Measure an engine or a server, beside what the machine allows.")
app.add_typer(bench, name="bench")


class Dtype(enum.StrEnum):
    auto = "auto"
    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"


class LoadFormat(enum.StrEnum):
    auto = "auto"
    dummy = "dummy"


class Api(enum.StrEnum):
    native = "native"
    chat = "chat"
    responses = "responses"


class LogLevel(enum.StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A Hugging Face directory or repository; tokenspeed-pocket if left out."),
]
Device = Annotated[str, typer.Option(help="torch's name of it; auto is a GPU where there is one.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Of weights and KV; auto is float32 on a CPU.")]
LoadFormatOption = Annotated[LoadFormat, typer.Option(help="dummy draws random weights from the config alone.")]
Cache = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for KV pages and state rows, such as 512MiB; if left out, 1GiB on a CPU, or what a GPU has free.",
    ),
]
MaxContext = Annotated[
    int | None, typer.Option(min=2, help="Tokens of prompt and output; the model's own if left out.")
]
MaxSequences = Annotated[int, typer.Option(min=1, help="Turns that run side by side.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads of the engine; 0 leaves it to torch.")]
ApiKey = Annotated[str | None, typer.Option(help="The key to that server; else TOKENSPEED_API_KEY.")]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write the figures as JSON.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tokenspeed {tokenspeed.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version and end.")
    ] = False,
) -> None:
    """An inference engine for agent sessions: a turn costs only its new tokens."""


@app.command()
def serve(
    model: Model = None,
    host: Annotated[str, typer.Option(help="Where to listen; without an API key, this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(metavar="TENANT=KEY", help="A key and whose it is; may be repeated.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="A web page's origin to let in; may be repeated.")
    ] = None,
    device: Device = "auto",
    dtype: DtypeOption = Dtype.auto,
    load_format: LoadFormatOption = LoadFormat.auto,
    cache: Cache = None,
    max_context: MaxContext = None,
    max_sequences: MaxSequences = 8,
    max_queue: Annotated[int, typer.Option(min=1, help="Turns that wait beside them; the next is refused.")] = 256,
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens computed in one step; by device if left out.")
    ] = None,
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Compute every prompt whole, for comparison.")
    ] = False,
    threads: Threads = 0,
    shared_preamble: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="JSON with instructions and tools that all tenants share; may be repeated."),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where sessions are kept; in your data directory, by model, if left out."),
    ] = None,
    journal: Annotated[
        str | None,
        typer.Option(metavar="postgresql://…", help="Keep sessions in this database instead of in a directory."),
    ] = None,
    no_journal: Annotated[
        bool, typer.Option("--no-journal", help="Keep sessions in memory only; they end with the server.")
    ] = False,
    log_level: Annotated[LogLevel, typer.Option(help="Of the server's log, on stderr.")] = LogLevel.warning,
) -> None:
    """Serve a model's sessions until interrupted."""
    from tokenspeed.cli import serve as command

    if no_journal + (data_dir is not None) + (journal is not None) > 1:
        raise typer.BadParameter("give one of --data-dir, --journal and --no-journal")
    if journal is not None and not journal.startswith(("postgresql://", "postgres://")):
        raise typer.BadParameter("--journal wants an address that begins with postgresql://")
    command.run(
        model,
        host=host,
        port=port,
        api_keys=api_key or [],
        origins=allow_origin or [],
        device=device,
        dtype=dtype.value,
        load_format=load_format.value,
        cache=cache,
        max_context=max_context,
        max_sequences=max_sequences,
        max_queue=max_queue,
        prefill_chunk=prefill_chunk,
        prefix_cache=not no_prefix_cache,
        threads=threads,
        shared_preambles=shared_preamble or [],
        data_dir=data_dir,
        journal=journal,
        no_journal=no_journal,
        log_level=log_level.value,
    )


@app.command()
def chat(
    model: Model = None,
    url: Annotated[
        str | None, typer.Option(help="A server that runs already, instead of one of this command's own.")
    ] = None,
    api_key: ApiKey = None,
    session: Annotated[str | None, typer.Option(help="The id of a session to go on with (with --url).")] = None,
    instructions: Annotated[str | None, typer.Option(help="The system text.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Bound of an answer.")] = None,
    device: Device = "auto",
    dtype: DtypeOption = Dtype.auto,
    load_format: LoadFormatOption = LoadFormat.auto,
) -> None:
    """Talk to a model in the terminal."""
    from tokenspeed.cli import chat as command

    if url is not None and model is not None:
        raise typer.BadParameter("give a MODEL or --url, not both")
    if session is not None and url is None:
        raise typer.BadParameter("--session needs --url")
    command.run(
        model,
        url=url,
        api_key=api_key,
        session=session,
        instructions=instructions,
        temperature=temperature,
        max_tokens=max_tokens,
        device=device,
        dtype=dtype.value,
        load_format=load_format.value,
    )


@app.command()
def demo(
    model: Model = None,
    device: Device = "auto",
    dtype: DtypeOption = Dtype.auto,
    load_format: LoadFormatOption = LoadFormat.auto,
) -> None:
    """Take a scripted session of twelve turns with tools and a fork, and check what each turn cost."""
    from tokenspeed.cli import demo as command

    command.run(model, device=device, dtype=dtype.value, load_format=load_format.value)


@app.command()
def doctor(device: Device = "auto", dtype: DtypeOption = Dtype.auto) -> None:
    """Say what is installed, what it runs on, and whether something is wrong with it."""
    from tokenspeed.cli import doctor as command

    command.run(device=device, dtype=dtype.value)


@bench.command("decode")
def bench_decode(
    model: Model = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens before the first step; may be repeated; 1000 if left out.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 1,
    tokens: Annotated[int, typer.Option(min=8, help="Steps to time.")] = 64,
    device: Device = "auto",
    dtype: DtypeOption = Dtype.auto,
    load_format: LoadFormatOption = LoadFormat.auto,
    cache: Cache = None,
    threads: Threads = 0,
    output: Output = None,
) -> None:
    """Time decode steps, beside the bytes that they must read at the rate of this machine's memory."""
    from tokenspeed.cli import bench as command
    from tokenspeed.cli.sizes import parse_size

    command.decode(
        model,
        contexts=context or [1000],
        batch=batch,
        tokens=tokens,
        output=output,
        device=device,
        dtype=dtype.value,
        load_format=load_format.value,
        cache=None if cache is None else parse_size(cache),
        threads=threads,
    )


@bench.command("agentic")
def bench_agentic(
    model: Model = None,
    url: Annotated[
        str | None, typer.Option(help="A server that runs already; MODEL is then its name of the model.")
    ] = None,
    api: Annotated[Api, typer.Option(help="What that server speaks.")] = Api.native,
    api_key: ApiKey = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the first turn.")] = 50_000,
    turns: Annotated[int, typer.Option(min=1, help="Of a conversation.")] = 12,
    new: Annotated[int, typer.Option(min=1, help="Tokens that each later turn adds.")] = 800,
    generate: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 500,
    conversations: Annotated[int, typer.Option(min=1, help="Side by side.")] = 1,
    device: Device = "auto",
    dtype: DtypeOption = Dtype.auto,
    load_format: LoadFormatOption = LoadFormat.auto,
    cache: Cache = None,
    threads: Threads = 0,
    output: Output = None,
) -> None:
    """Take the turns of an agent over one long context, and say what of them came from the cache."""
    from tokenspeed.bench.agentic import Workload
    from tokenspeed.cli import bench as command
    from tokenspeed.cli.sizes import parse_size

    command.agentic(
        model,
        workload=Workload(context, turns, new, generate, conversations),
        url=url,
        api=api.value,
        api_key=api_key,
        output=output,
        device=device,
        dtype=dtype.value,
        load_format=load_format.value,
        cache=None if cache is None else parse_size(cache),
        threads=threads,
    )


def run() -> None:
    """Parse the command line and carry it out; ends the process."""
    try:
        app()
    except CommandError as error:
        sys.exit(f"error: {one_line(error)}")
