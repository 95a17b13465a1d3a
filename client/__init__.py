"""The SDK: what an agent imports. Needs httpx, websockets and msgspec alone."""
