"""Conversations: transcript, rendering, parsing, lifecycle."""
