from __future__ import annotations

import pytest

from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.server.access import LOCAL_TENANT, ApiKeys, check_origin, is_loopback


def test_a_key_names_its_tenant() -> None:
    keys = ApiKeys.parse(["red=k1", "red=k2", "blue=k=3"])
    assert keys.tenants == ["blue", "red"]
    assert [keys.tenant(f"Bearer {key}") for key in ("k1", "k2", "k=3")] == ["red", "red", "blue"]
    assert keys.tenant("bearer  k1") == "red"


@pytest.mark.parametrize("header", [None, "", "k1", "Basic k1", "Bearer", "Bearer ", "Bearer k", "Bearer k11"])
def test_any_other_key_is_refused(header: str | None) -> None:
    with pytest.raises(SessionError) as caught:
        ApiKeys.parse(["red=k1"]).tenant(header)
    assert (caught.value.code, caught.value.status) == ("unauthorized", 401)


def test_without_keys_everyone_is_local() -> None:
    assert ApiKeys({}).tenant(None) == ApiKeys({}).tenant("Bearer whatever") == LOCAL_TENANT
    assert not ApiKeys({})


@pytest.mark.parametrize("pairs", [["k1"], ["=k1"], ["red="], ["red=k", "blue=k"]])
def test_a_pair_of_another_form_is_refused(pairs: list[str]) -> None:
    with pytest.raises(ValueError, match=r"TENANT=KEY|same API key"):
        ApiKeys.parse(pairs)


@pytest.mark.parametrize(
    ("origin", "host", "local_only", "allowed"),
    [
        (None, "localhost:8000", True, True),
        (None, "[::1]:8000", True, True),
        (None, "engine.example", True, False),
        (None, "engine.example", False, True),
        ("http://localhost:8000", "localhost:8000", True, True),
        ("http://localhost:9000", "localhost:8000", True, False),
        ("https://evil.example", "localhost:8000", True, False),
        ("http://evil.example:8000", "evil.example:8000", True, False),  # a name of theirs pointed at this machine
        ("https://engine.example", "engine.example", False, True),
        ("https://app.example", "engine.example", False, True),
        ("null", "engine.example", False, False),
    ],
)
def test_which_pages_may_connect(origin: str | None, host: str, local_only: bool, allowed: bool) -> None:
    def check() -> None:
        check_origin(origin, host, ["https://app.example"], local_only)

    if allowed:
        check()
    else:
        with pytest.raises(SessionError, match="unauthorized"):
            check()


def test_loopback_is_an_address_of_this_machine_alone() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("192.0.2.1")
