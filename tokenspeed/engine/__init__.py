"""The engine: core loop, process, and the interface that sessions use."""
