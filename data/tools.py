"""Tools and their calls, brought from the forms that data sets write into OpenAI's."""

from collections.abc import Mapping
from typing import Any

from aerie.data.values import UnusableRow, is_empty, is_plain, is_text, read_object

TOOL_COLUMNS = ("tools", "functions")
CALL_COLUMNS = ("tool_calls", "function_call")
ARGUMENT_KEYS = ("arguments", "parameters", "input", "args", "kwargs")  # of a call
CALL_KEYS = {"name", "id", "type", "index", "description", *ARGUMENT_KEYS}


def calls_of(turn: Mapping[str, Any], role: str, number: int) -> list[Any]:
    """A turn's calls of tools, in OpenAI's form; [] if it has none."""
    calls = list[Any]()
    for key in CALL_COLUMNS:
        if turn.get(key) is None or is_empty(turn[key]):
            continue
        if role != "assistant":
            raise UnusableRow("a turn that is not an answer calls tools", f"turn {number}")
        same = calls
        calls = tool_calls_of(turn[key], number)
        require_arguments(calls, number)
        if same and [call["function"] for call in same] != [call["function"] for call in calls]:
            raise UnusableRow("a turn has two sets of calls", f"turn {number}")
        calls = same or calls
    return calls


def spoken_calls(text: str, turn: Mapping[str, Any], number: int) -> list[Any]:
    """The calls that are the text of ShareGPT's turn `function_call`."""
    calls = read_object(text)
    if isinstance(calls, str):
        raise UnusableRow("a call is not JSON", f"turn {number}: {text.strip()!r:.60}")
    return calls_of({**turn, "function_call": calls}, "assistant", number)


def tool_calls_of(calls: Any, number: int) -> list[Any]:
    """The calls in OpenAI's form, but with their arguments as an object instead of JSON text.

    A template would escape JSON text a second time. Arguments that are not JSON stay as they are.
    """
    calls = read_object(calls)
    if isinstance(calls, Mapping):
        calls = [calls]
    if not isinstance(calls, list):
        raise UnusableRow("tool calls are not a list", f"turn {number}")
    return [_call_of(read_object(call), number) for call in calls]


def _call_of(call: Any, number: int) -> dict[str, Any]:
    function = call
    if isinstance(call, Mapping) and call.get("function"):
        function = read_object(call["function"])
    if not isinstance(function, Mapping) or not is_text(function.get("name")):
        raise UnusableRow("a tool call names no function", f"turn {number}")
    holders = [call, function]
    odd = (call.keys() - {"function"} | function.keys()) - CALL_KEYS
    odd = {key for key in odd if not all(is_empty(holder.get(key)) for holder in holders)}
    rest = {key: value for key, value in call.items() if key in ("id", "type", "index")}
    odd |= {key for key, value in rest.items() if not isinstance(value, str | int | None)}
    if odd:
        raise UnusableRow(f'call key "{min(map(str, odd))}" cannot be read', f"turn {number}")
    values = [holder[key] for holder in holders for key in ARGUMENT_KEYS if holder.get(key)]
    values = [object_or_text(value) for value in values]
    if any(value != values[0] for value in values) or call.get("name") not in (
        None,
        function["name"],
    ):
        raise UnusableRow("a tool call has two names or arguments", f"turn {number}")
    named_call = {"name": function["name"], "arguments": values[0] if values else {}}
    return {**rest, "type": "function", "function": named_call}


def object_or_text(arguments: Any) -> Any:
    """The arguments of a call as an object; unchanged if they are not one."""
    value = read_object(arguments)
    return value if isinstance(value, dict) and is_plain(value) else arguments


def require_arguments(calls: list[Any], number: int) -> None:
    """UnusableRow if the arguments of a call are not a JSON object."""
    for call in calls:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, dict) or not is_plain(arguments):
            raise UnusableRow(
                "the arguments of a call are not a JSON object", f"turn {number}: {arguments!r:.60}"
            )


def tools_of(row: Mapping[str, Any], turns: list[Any]) -> list[Any] | None:
    """The tools of a row or of one of its turns, in OpenAI's form; None if it has none."""
    tools: list[Any] | None = None
    for holder in (row, *turns):
        for name in TOOL_COLUMNS:
            if holder.get(name) and not is_empty(holder[name]):
                more = _tools_as_openai(holder[name])
                if tools not in (None, more):
                    raise UnusableRow("the row has several sets of tools", "")
                tools = more
    return tools


def _tools_as_openai(tools: Any) -> list[Any]:
    tools = read_object(tools)
    if isinstance(tools, Mapping) and not tools.keys().isdisjoint(("function", "name")):
        tools = [tools]
    if not isinstance(tools, list):
        raise UnusableRow("tools are not a list", f"'tools' is {type(tools).__name__}")
    as_openai = list[Any]()
    for tool in map(read_object, tools):
        is_object = isinstance(tool, Mapping) and is_plain(tool)
        if not is_object or not isinstance(tool.get("function", {}), Mapping):
            raise UnusableRow("a tool is not an object", f"{tool!r:.60}")
        is_bare = "function" not in tool and "name" in tool
        as_openai.append({"type": "function", "function": tool} if is_bare else tool)
    return as_openai
