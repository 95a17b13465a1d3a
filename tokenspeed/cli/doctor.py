"""`tokenspeed doctor`: what is installed and what it runs on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console

import tokenspeed
from tokenspeed.cli.errors import CommandError
from tokenspeed.cli.sizes import show_size
from tokenspeed.kernels.registry import select

DISTRIBUTION = "tokenspeed-sessions"
OTHER = "tokenspeed"
"""A distribution that is not this project's, with the same import package and script."""

LIBRARIES = (
    "torch",
    "triton",
    "flashinfer-python",
    "tokenizers",
    "safetensors",
    "pyzmq",
    "litestar",
    "uvicorn",
    "websockets",
    "msgspec",
)


def run(*, device: str, dtype: str) -> None:
    """Print the findings.

    Raises:
        CommandError: something that must be mended, after everything was printed.
    """
    console = Console(highlight=False, soft_wrap=True)

    def say(title: str, text: str) -> None:
        console.print(f"{title:20} {text}", markup=False)

    say("tokenspeed", f"{tokenspeed.__version__} ({os.path.dirname(tokenspeed.__file__)})")
    say("python", f"{platform.python_version()} on {platform.platform()}")
    for library in LIBRARIES:
        say(library, installed(library) or "not installed")
    say("processor", f"{os.cpu_count()} cores, {show_size(free_memory_bytes())} memory free")
    for name, free_bytes, total_bytes in gpus():
        say("gpu", f"{name}, {show_size(free_bytes)} of {show_size(total_bytes)} free")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = _operators(device, dtype)
    for implementation in dict.fromkeys(chosen.values()):
        names = [name for name, by in chosen.items() if by == implementation]
        say(f"on {device}", f"{implementation}: {', '.join(names)}")
    conflict = installed(OTHER)
    if conflict is not None:
        raise CommandError(
            f"the distribution {OTHER} {conflict} is installed, too. It is another project with the same import name "
            f"and script, so the two overwrite each other: uninstall both, then install {DISTRIBUTION} again"
        )
    console.print("nothing wrong found", markup=False)


def installed(distribution: str) -> str | None:
    """The version of an installed distribution; None if it is not there."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def free_memory_bytes() -> int:
    """Memory that this machine could give out without swapping."""
    try:
        with open("/proc/meminfo") as lines:
            found = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(found.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gpus() -> list[tuple[str, int, int]]:
    """Name, free and total bytes of every CUDA device."""
    found = []
    for index in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        found.append((torch.cuda.get_device_name(index), free_bytes, total_bytes))
    return found


def _operators(device: str, dtype: str) -> dict[str, str]:
    """The implementation that serves each operator."""
    try:
        place = torch.device(device)
    except RuntimeError:
        raise CommandError(f"{device!r} is no device that torch knows") from None
    if dtype == "auto":
        dtype = "float32" if place.type == "cpu" else "bfloat16"
    return select(place, getattr(torch, dtype)).chosen
