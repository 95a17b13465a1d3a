"""tokenspeed-pocket: the small model that ships with the package."""

from __future__ import annotations

from pathlib import Path

DIRECTORY = Path(__file__).parent
"""A Hugging Face model directory."""
