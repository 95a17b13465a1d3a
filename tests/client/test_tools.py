from __future__ import annotations

import asyncio
import enum
import threading
from dataclasses import dataclass
from typing import Literal

import pytest

from tokenspeed.client.errors import StepLimitExceeded
from tokenspeed.client.loop import ToolLoop
from tokenspeed.client.protocol.events import Timings, Usage
from tokenspeed.client.protocol.items import FunctionCallItem, FunctionTool
from tokenspeed.client.tools import Toolset, tool_output
from tokenspeed.client.turns import Turn


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Place:
    street: str


def paint(colour: Colour, times: int = 1, size: float | None = None, mode: Literal["wet", "dry"] = "dry") -> str:
    assert isinstance(colour, Colour)
    return f"{colour.name} {times!r} {size!r} {mode}"


def visit(place: Place, names: list[str]) -> dict[str, object]:
    return {"street": place.street, "names": names}


def fails(reason: str) -> None:
    raise ValueError(reason)


def answer(arguments: str, name: str = "paint") -> str:
    tools = Toolset([paint, visit, fails])
    return tools.run(FunctionCallItem("c1", name, arguments)).text


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("paint", '{"colour":"red"}', "RED 1 None dry"),
        ("paint", '{"colour":"red","times":"3","size":2,"mode":"wet"}', "RED 3 2.0 wet"),
        ("paint", '{"colour":"red","size":null}', "RED 1 None dry"),
        ("visit", '{"place":{"street":"Ä\\n\\"x\\""},"names":["日本"]}', '{"street":"Ä\\n\\"x\\"","names":["日本"]}'),
    ],
)
def test_arguments_reach_the_function_in_its_types(name: str, arguments: str, expected: str) -> None:
    assert answer(arguments, name) == expected


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("fails", '{"reason":"no luck"}', "error: ValueError: no luck"),
        ("paint", '{"colour":"green"}', "error: ValueError: argument 'colour': Invalid enum value 'green'"),
        ("paint", '{"colour":"red","times":"many"}', "error: ValueError: argument 'times': Expected `int`, got `str`"),
        ("paint", "{}", "error: TypeError: paint: missing argument 'colour'"),
        ("paint", '{"colour":"red","x":1}', "error: TypeError: paint: unknown argument 'x'"),
        ("paint", "[1]", "error: ValueError: the arguments are no JSON object: Expected `object`, got `array`"),
        ("dance", "{}", "error: NameError: there is no tool 'dance'; there are: paint, visit, fails"),
    ],
)
def test_what_goes_wrong_is_told_to_the_model(name: str, arguments: str, expected: str) -> None:
    assert answer(arguments, name) == expected


def test_a_call_that_could_not_be_read_is_answered_with_the_reason() -> None:
    call = FunctionCallItem("c1", "paint", "{}", status="incomplete", parse_error="no closing tag", raw="<x")
    tools = Toolset([paint])
    assert tools.runs(call)
    assert tools.run(call).text == "error: ValueError: the call could not be read: no closing tag"


def test_interrupts_are_not_swallowed() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Toolset([stop]).run(FunctionCallItem("c1", "stop", "{}"))


def test_schemas_of_both_styles_are_offered_and_left_to_the_caller() -> None:
    parameters = {"type": "object", "properties": {}}
    tools = Toolset(
        [
            paint,
            {"type": "function", "name": "responses", "parameters": parameters},
            {"type": "function", "function": {"name": "chat", "description": "D", "parameters": parameters}},
            FunctionTool("struct"),
        ]
    )
    assert [tool.name for tool in tools.offered] == ["paint", "responses", "chat", "struct"]
    assert tools.offered[2].description == "D"
    runs = {name: tools.runs(FunctionCallItem("c", name, "{}")) for name in ("paint", "chat", "struct", "unknown")}
    assert runs == {"paint": True, "chat": False, "struct": False, "unknown": True}


@pytest.mark.parametrize("bad", [{"type": "function"}, {"name": 3}, {"function": {}}])
def test_a_bad_schema_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a tool's schema"):
        Toolset([bad])


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tools are named 'paint'"):
        Toolset([paint, FunctionTool("paint")])
    with pytest.raises(TypeError, match="not int"):
        Toolset([3])


@pytest.mark.parametrize(
    ("value", "text"),
    [("plain", "plain"), (17, "17"), (None, "null"), ([1, "a"], '[1,"a"]'), (Place("x"), '{"street":"x"}')],
)
def test_results_are_text_or_json(value: object, text: str) -> None:
    assert tool_output("c1", value).output == text


def test_a_result_without_a_json_form_is_its_text() -> None:
    assert tool_output("c1", {"error": ValueError("x")}).output == '{"error":"x"}'
    assert tool_output("c1", [2**70]).output == f"[{2**70}]"
    endless: list[object] = []
    endless.append(endless)
    assert tool_output("c1", endless).output == "[[...]]"


def test_async_functions_run_in_the_loop_and_plain_ones_in_threads() -> None:
    async def here() -> bool:
        return threading.current_thread() is threading.main_thread()

    def there() -> bool:
        return threading.current_thread() is not threading.main_thread()

    async def run() -> list[str]:
        tools = Toolset([here, there])
        return [(await tools.run_async(FunctionCallItem("c", name, "{}"))).text for name in ("here", "there", "gone")]

    assert asyncio.run(run()) == ["true", "true", "error: NameError: there is no tool 'gone'; there are: here, there"]
    with pytest.raises(TypeError, match="here is async; use AsyncClient"):
        Toolset([here]).refuse_async()


def turn_with(*names: str, reason: str = "tool_calls") -> Turn:
    calls = [FunctionCallItem(f"c{index}", name, "{}") for index, name in enumerate(names)]
    return Turn("t", "s", None, calls, "completed", reason, Usage(), Timings())


def test_the_loop_stops_at_its_limit_with_the_last_turn_in_hand() -> None:
    loop = ToolLoop(Toolset([paint]), max_steps=2)
    assert len(loop.after(turn_with("paint"))) == 1
    last = turn_with("paint", "paint")
    with pytest.raises(StepLimitExceeded, match=r"\(paint, paint\) after max_steps=2") as caught:
        loop.after(last)
    assert caught.value.turn.items is last.items
    assert len(caught.value.turn.steps) == 2
    with pytest.raises(ValueError, match="max_steps is 0"):
        ToolLoop(Toolset(), 0)


def test_a_mixed_answer_waits_for_the_callers_part() -> None:
    tools = Toolset([paint, FunctionTool("ask")])
    loop = ToolLoop(tools, 1)
    (call,) = loop.after(turn_with("paint", "ask"))
    loop.answers.append(tools.run(call))
    assert not loop.complete
    assert loop.held == ("t", tuple(loop.answers))


def test_a_turn_cut_by_its_length_runs_nothing() -> None:
    assert ToolLoop(Toolset([paint]), 4).after(turn_with("paint", reason="length")) == []
