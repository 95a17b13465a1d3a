"""What the server counts, in Prometheus' format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tokenspeed.client.protocol.commands import Command, SessionClose, SessionFork, SessionOpen, TurnCreate
from tokenspeed.client.protocol.events import Reply, TurnEnded
from tokenspeed.engine.messages import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    """The counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self._turns = Counter("tokenspeed_turns", "Turns that ended, by status.", ["status"], registry=registry)
        self._prompt = Counter("tokenspeed_prompt_tokens", "Prompt tokens of ended turns.", registry=registry)
        self._reused = Counter(
            "tokenspeed_reused_tokens", "Prompt tokens that came from the cache, by tier.", ["tier"], registry=registry
        )
        self._computed = Counter("tokenspeed_computed_tokens", "Prompt tokens that were computed.", registry=registry)
        self._output = Counter("tokenspeed_output_tokens", "Tokens generated and kept.", registry=registry)
        self._ttft = Histogram(
            "tokenspeed_ttft_seconds",
            "From a turn's arrival to its first output token.",
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self._itl = Histogram(
            "tokenspeed_itl_seconds",
            "Median time between the output tokens of a turn.",
            buckets=_ITL_BUCKETS,
            registry=registry,
        )
        self._sessions = Gauge("tokenspeed_sessions", "Sessions that are not closed.", registry=registry)
        self._websockets = Gauge("tokenspeed_websockets", "Open websockets.", registry=registry)
        self._engine = {
            name: Gauge(f"tokenspeed_{name}", text, registry=registry)
            for name, text in {
                "running_turns": "Turns in the engine's batch.",
                "queued_turns": "Turns waiting for admission.",
                "pages_total": "KV pages.",
                "pages_free": "KV pages that hold nothing.",
                "rows_total": "State rows.",
                "rows_free": "State rows that hold nothing.",
                "model_tokens": "Token rows that the model embedded since the engine's start.",
                "prefilled_tokens": "Of these, tokens of prompts.",
                "decoded_tokens": "Of these, sampled tokens, those discarded with steps in flight included.",
            }.items()
        }

    def connected(self) -> None:
        self._websockets.inc()

    def disconnected(self) -> None:
        self._websockets.dec()

    def answered(self, command: Command, reply: Reply) -> None:
        """Count the sessions that a command made or ended."""
        if isinstance(command, SessionOpen):
            self._sessions.inc()
        elif isinstance(command, SessionFork) or (isinstance(command, TurnCreate) and command.session is None):
            self._sessions.inc(len(reply.sessions) if reply.sessions is not None else 1)
        elif isinstance(command, SessionClose):
            self._sessions.dec()

    def ended(self, turn: TurnEnded) -> None:
        """Count an ended turn and its tokens."""
        usage, timings = turn.usage, turn.timings
        self._turns.labels(turn.status).inc()
        self._prompt.inc(usage.prompt)
        for tier in ("device", "host", "disk"):
            self._reused.labels(tier).inc(getattr(usage.reused, tier))
        self._computed.inc(usage.computed)
        self._output.inc(usage.output)
        if usage.output > 0:
            self._ttft.observe(timings.ttft_s)
        if usage.output > 1:
            self._itl.observe(timings.itl_p50_s)

    def engine(self, stats: EngineStats) -> None:
        """Take over the engine's gauges."""
        self._engine["running_turns"].set(stats.running)
        self._engine["queued_turns"].set(stats.queued)
        self._engine["model_tokens"].set(stats.embedded)
        self._engine["prefilled_tokens"].set(stats.computed)
        self._engine["decoded_tokens"].set(stats.decoded)
        for name in ("pages_total", "pages_free", "rows_total", "rows_free"):
            self._engine[name].set(getattr(stats, name))

    def render(self) -> bytes:
        """All of it as `CONTENT_TYPE`."""
        return generate_latest(self._registry)
