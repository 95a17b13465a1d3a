"""Servers as targets of the agentic workload: native sessions, Chat Completions and Responses.

A server counts tokens, a client sends text. So the text is digits between spaces, of which any tokenizer makes the same
number of tokens each, and two short turns at the beginning tell how many that are and how many stand around them.
"""

from __future__ import annotations

import json
import random
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import httpx

from tokenspeed.bench.agentic import Answer, Ask, Script
from tokenspeed.bench.driver import BenchError
from tokenspeed.client import Client, ConnectionFailed, ProtocolError, Session, SessionError, tool_output
from tokenspeed.client.address import Address

Api = Literal["native", "chat", "responses"]

PROBES = (100, 200)
"""Digits of the two turns that tell what a digit costs."""
COINCIDENCE = 16
"""Tokens of digits that two contents may begin with alike."""
TEMPLATE = 32
"""Tokens that a template may put around a later turn more, or less, than around a first one."""
READ_AGAIN = 0.25
"""Part of an answer's tokens by which it may differ where a server reads it again as text."""


class Talk(Protocol):
    """A conversation with a server."""

    def turn(self, text: str, generate: int) -> Answer:
        """Say something; the answer, of `generate` tokens."""

    def close(self) -> None: ...


class Connection(Protocol):
    """A server. `exact`: it goes on from a conversation's own ids, and does not read its answers again as text."""

    exact: bool

    def open(self) -> Talk: ...

    def close(self) -> None: ...


class ServerTarget:
    """Takes turns with a server, every conversation in a thread of its own."""

    def __init__(self, connection: Connection) -> None:
        """Raises BenchError if the server does not answer as its API says."""
        self._connection = connection
        self.cache_at_start = "nothing is shared but what the template writes: contents begin with fresh random digits"
        few, many = (self._probe(digits) for digits in PROBES)
        self._per_digit = (many - few) / (PROBES[1] - PROBES[0])
        if self._per_digit <= 0:
            raise BenchError(f"prompts of {PROBES[0]} and of {PROBES[1]} digits have {few} and {many} tokens")
        around = few - PROBES[0] * self._per_digit
        self._around = around
        self.shared = round(around) + COINCIDENCE
        self._failed = threading.Event()

    def slack(self, generate: int) -> int:
        read_again = 0.0 if self._connection.exact else READ_AGAIN * generate
        return round(self._around + TEMPLATE + read_again)

    def converse(self, scripts: Sequence[Script]) -> None:
        with ThreadPoolExecutor(len(scripts)) as pool:
            talks = [pool.submit(self._converse, script) for script in scripts]
        for talk in talks:
            talk.result()

    def _converse(self, script: Script) -> None:
        talk = self._connection.open()
        try:
            ask = next(script)
            while not self._failed.is_set():
                ask = script.send(talk.turn(self._text(ask), ask.generate))
        except StopIteration:
            pass
        except BaseException:
            self._failed.set()  # the others stop at their next turn
            raise
        finally:
            talk.close()

    def _probe(self, digits: int) -> int:
        talk = self._connection.open()
        try:
            return talk.turn(digits_of(secrets.token_hex(), digits), 1).prompt
        finally:
            talk.close()

    def _text(self, ask: Ask) -> str:
        return digits_of(ask.seed, max(1, round((ask.tokens - self._around) / self._per_digit)))


def digits_of(seed: str, count: int) -> str:
    """`count` random digits between spaces."""
    return " ".join(random.Random(seed).choices("0123456789", k=count))


def connect(url: str, api: Api, api_key: str | None = None, model: str | None = None) -> Connection:
    """
    Args:
        api_key: else TOKENSPEED_API_KEY.
        model: the server's name of it; else, where the API wants one, the first that it lists.

    Raises:
        BenchError: the URL is none, or the server cannot be reached.
    """
    try:
        address = Address.of(url, api_key)
    except ValueError as error:
        raise BenchError(str(error)) from None
    if api == "native":
        return Native(Client(address.base_url, address.api_key), model)
    return OpenAI(address, api, model)


class Native:
    """Sessions of this project's server."""

    exact = True

    def __init__(self, client: Client, model: str | None = None) -> None:
        self._client = client
        self._model = model

    def open(self) -> Talk:
        with _told():
            return _SessionTalk(self._client.session(model=self._model, temperature=0, ignore_eos=True))

    def close(self) -> None:
        self._client.close()


class _SessionTalk:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._pending: list[Any] = []  # results for calls that nobody meant

    def turn(self, text: str, generate: int) -> Answer:
        arrivals: list[float] = []
        with _told():
            begun = time.perf_counter()
            message = {"role": "user", "content": text}
            stream = self._session.turn([*self._pending, message], stream=True, max_tokens=generate)
            for _ in stream:
                arrivals.append(time.perf_counter() - begun)
            turn = stream.result()
        arrivals = arrivals or [time.perf_counter() - begun]
        self._pending = [tool_output(call, "") for call in turn.tool_calls]
        usage, said = turn.usage, f"{turn.reasoning}{turn.text}"
        return Answer(usage.prompt, usage.output, usage.reused.total, usage.computed, said, arrivals)

    def close(self) -> None:
        with _told():
            self._session.close()


class OpenAI:
    """A server with Chat Completions, which are sent the whole conversation each time, or Responses, which are chained
    by `previous_response_id`."""

    exact = False

    def __init__(self, address: Address, api: Literal["chat", "responses"], model: str | None = None) -> None:
        self._http = httpx.Client(
            base_url=address.base_url.removesuffix("/v1") + "/v1/",
            headers=address.headers,
            timeout=httpx.Timeout(600, connect=10),
            limits=httpx.Limits(max_connections=None),
            trust_env=address.proxy is True,
        )
        self._api = api
        with _told():
            self._model = model or self._first_model()

    def open(self) -> Talk:
        return (_ChatTalk if self._api == "chat" else _ResponsesTalk)(self._http, self._model)

    def close(self) -> None:
        self._http.close()

    def _first_model(self) -> str:
        reply = self._http.get("models").raise_for_status().json()
        return str(reply["data"][0]["id"])


class _ChatTalk:
    def __init__(self, http: httpx.Client, model: str) -> None:
        self._http = http
        self._model = model
        self._messages: list[dict[str, str]] = []

    def turn(self, text: str, generate: int) -> Answer:
        self._messages.append({"role": "user", "content": text})
        body = {
            "model": self._model,
            "messages": self._messages,
            "max_tokens": generate,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        pieces: list[str] = []
        thoughts: list[str] = []
        arrivals: list[float] = []
        usage: dict[str, Any] = {}
        with _told():
            begun = time.perf_counter()
            for event in _events(self._http, "chat/completions", body):
                usage = event.get("usage") or usage
                for choice in event.get("choices") or []:
                    delta = choice.get("delta") or {}
                    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                    piece = delta.get("content") or ""
                    if piece or thought or delta.get("tool_calls"):
                        arrivals.append(time.perf_counter() - begun)
                    pieces.append(piece)
                    thoughts.append(thought)
            answer = {"role": "assistant", "content": "".join(pieces)}
            if any(thoughts):
                answer["reasoning_content"] = "".join(thoughts)
            self._messages.append(answer)
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            said = "".join((*thoughts, *pieces))
            arrivals = arrivals or [time.perf_counter() - begun]
            return _answer(usage["prompt_tokens"], usage["completion_tokens"], cached, said, arrivals)

    def close(self) -> None:
        pass


class _ResponsesTalk:
    def __init__(self, http: httpx.Client, model: str) -> None:
        self._http = http
        self._model = model
        self._previous: str | None = None

    def turn(self, text: str, generate: int) -> Answer:
        body = {
            "model": self._model,
            "input": text,
            "max_output_tokens": generate,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "store": True,
        }
        if self._previous is not None:
            body["previous_response_id"] = self._previous
        pieces: list[str] = []
        arrivals: list[float] = []
        response: dict[str, Any] = {}
        with _told():
            begun = time.perf_counter()
            for event in _events(self._http, "responses", body):
                kind = str(event.get("type"))
                if kind.endswith(".delta") and event.get("delta"):
                    arrivals.append(time.perf_counter() - begun)
                    pieces.append(str(event["delta"]))
                elif kind in ("response.completed", "response.incomplete"):
                    response = event["response"]
                elif kind in ("response.failed", "error"):
                    raise BenchError(f"the server failed: {json.dumps(event)[:300]}")
            usage = response["usage"]
            self._previous = str(response["id"])
            cached = (usage.get("input_tokens_details") or {}).get("cached_tokens")
            arrivals = arrivals or [time.perf_counter() - begun]
            return _answer(usage["input_tokens"], usage["output_tokens"], cached, "".join(pieces), arrivals)

    def close(self) -> None:
        pass


def _answer(prompt: int, output: int, cached: int | None, said: str, arrivals: list[float]) -> Answer:
    return Answer(prompt, output, cached, prompt - cached if cached is not None else None, said, arrivals)


def _events(http: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event."""
    with http.stream("POST", path, json=body) as response:
        if not response.is_success:
            response.read()
            raise BenchError(f"{response.url} answered {response.status_code}: {response.text[:300]}")
        for line in response.iter_lines():
            data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
            if data and data != "[DONE]":
                event = json.loads(data)
                if event.get("error"):
                    raise BenchError(f"{response.url}: {json.dumps(event['error'])[:300]}")
                yield event


@contextmanager
def _told() -> Iterator[None]:
    """What goes wrong between here and the server, as BenchError."""
    try:
        yield
    except (SessionError, ConnectionFailed, ProtocolError) as error:
        raise BenchError(str(error)) from None
    except httpx.HTTPStatusError as error:
        raise BenchError(f"{error.request.url} answered {error.response.status_code}") from None
    except httpx.HTTPError as error:
        raise BenchError(f"the server cannot be reached: {error or type(error).__name__}") from None
    except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
        raise BenchError(f"the server does not answer as this API says: {type(error).__name__} {error}") from None
