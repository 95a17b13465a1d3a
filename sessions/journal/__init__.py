"""The journal: what a server must not lose, durable before it is acknowledged."""
