"""The OpenAPI document of the HTTP mirror, from the same table and structs that serve it."""

from __future__ import annotations

from typing import Any

import msgspec

import tokenspeed
from tokenspeed.client.protocol.errors import ERROR_RULES, ErrorBody
from tokenspeed.client.protocol.events import ServerMessage
from tokenspeed.server.operations import OPERATIONS, Operation, body_type, query_type

_REF = "#/components/schemas/{name}"
_REFUSALS = {
    400: "The request cannot be read, or says what the session cannot do.",
    401: "The API key is missing or unknown, or the page's origin is not allowed.",
    404: "There is no such session or turn.",
    409: "The session takes a turn; it takes one at a time.",
    412: "The session stands on another turn than expected.",
    413: "The body is larger than the server takes.",
    415: "The body is not application/json.",
    429: "Too much is waiting or running.",
    500: "The server failed.",
    503: "The engine is starting again, or too busy.",
}
_ALWAYS = (400, 401, 404, 500, 503)
_LABELS = "label"


def document() -> dict[str, Any]:
    """The document as JSON has it."""
    types: list[Any] = [ErrorBody, ServerMessage]
    for operation in OPERATIONS:
        types += [part for part in (operation.answer, body_type(operation), query_type(operation)) if part is not None]
    _, components = msgspec.json.schema_components(types, ref_template=_REF)
    schemas = {name: {key: schema[key] for key in schema if key != "title"} for name, schema in components.items()}
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schemas)
    for operation in OPERATIONS:
        query = query_type(operation)
        if query is not None:
            schemas.pop(query.__name__, None)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tokenspeed",
            "version": tokenspeed.__version__,
            "description": "Sessions for LLM agents. The websocket /v1/sessions/ws has the same commands and events.",
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _operation(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "description": (operation.command.__doc__ or "").strip(),
        "parameters": [_path_parameter(name) for name in operation.in_path] + _query_parameters(operation, schemas),
        "responses": _responses(operation),
    }
    body = body_type(operation)
    if body is not None:
        described["requestBody"] = {
            "required": any(field.required for field in msgspec.structs.fields(body)),
            "content": {"application/json": {"schema": _reference(body)}},
        }
    return described


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _query_parameters(operation: Operation, schemas: dict[str, Any]) -> list[dict[str, Any]]:
    query = query_type(operation)
    if query is None:
        return []
    parameters = []
    for name, schema in schemas[query.__name__]["properties"].items():
        if name == "labels":
            labels = {"type": "array", "items": {"type": "string", "pattern": "^[^=]*=.*$"}}
            text = "NAME=VALUE; sessions that bear all of the labels given."
            parameters.append({"name": _LABELS, "in": "query", "description": text, "schema": labels})
        else:
            # In a URL nothing is null: what is not said is left out.
            kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
            parameters.append({"name": name, "in": "query", "schema": kinds[0]})
    return parameters


def _responses(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content["application/json"] = {"schema": _reference(operation.answer)}
    if operation.takes_turns:
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": "With `Accept: text/event-stream`: the reply, then events until every turn has ended, "
                "each as `event: TYPE` and `data: JSON` (`Reply` and the `Turn…` schemas); comments while nothing "
                "happens. A client that leaves does not end the turn.",
            }
        }
    succeeded: dict[str, Any] = {"description": operation.summary + "."}
    if content:
        succeeded["content"] = content
    statuses = [*_ALWAYS]
    if operation.body:
        statuses += [409, 412, 413, 415, 429]
    if operation.method == "DELETE":
        statuses.append(409)
    return {str(operation.status): succeeded} | {str(status): _refusal(status) for status in sorted(statuses)}


def _refusal(status: int) -> dict[str, Any]:
    codes = [code for code, rule in ERROR_RULES.items() if rule.status == status]
    named = f" Codes: {', '.join(codes)}." if codes else ""
    refusal: dict[str, Any] = {
        "description": _REFUSALS[status] + named,
        "content": {"application/json": {"schema": _reference(ErrorBody)}},
    }
    headers = {429: "retry-after", 503: "retry-after", 409: "x-should-retry", 401: "www-authenticate"}
    if status in headers:
        refusal["headers"] = {headers[status]: {"schema": {"type": "string"}}}
    return refusal


def _reference(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=struct.__name__)}
