"""Measuring an engine: each figure beside the bound of the machine and behind a check of what was computed."""
