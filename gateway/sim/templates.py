"""From messages to a prompt's tokens, and from a sample to the message or tool call that it makes.

Ids that engines invent stay out of the prompt, as with most chat templates.
"""

import json
from dataclasses import dataclass
from typing import Any

from xxhash import xxh64_digest

from gateway.sim.fields import Fields, Refused
from gateway.sim.model import ASSISTANT, END, IMAGE, ROLES
from gateway.sim.runs import tokens_of


def chat_prompt(fields: Fields, longest: int, messages: Any = None) -> list[int]:
    """The prompt's tokens of a chat body, or of its `messages` given apart. Refused: they are no messages."""
    listed = fields.get("messages") if messages is None else messages
    if not isinstance(listed, list) or not listed:
        raise Refused(400, "Input should be a valid list", "messages", schema=True)
    tokens: list[int] = []
    for tool in fields.get("tools") or []:
        tokens += [ROLES["system"], *tokens_of(json.dumps(tool, ensure_ascii=False), longest), END]
    for message in listed:
        tokens += _message(message, longest)
    if fields.flag("continue_final_message"):
        return tokens[:-1]
    return [*tokens, ASSISTANT] if fields.flag("add_generation_prompt", True) else tokens


def _message(message: Any, longest: int) -> list[int]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise Refused(400, "a message must be an object with a known role", "messages", schema=True)
    tokens = [ROLES[message["role"]], *content_tokens(message.get("content"), longest)]
    for call in message.get("tool_calls") or []:
        function = call.get("function", {}) if isinstance(call, dict) else {}
        tokens += tokens_of(f"{function.get('name')} {function.get('arguments')}", longest)
    return [*tokens, END]


def content_tokens(content: Any, longest: int) -> list[int]:
    """The tokens of a message's content: a text, or parts; a picture counts by what it is."""
    if content is None:
        return []
    if isinstance(content, str):
        return tokens_of(content, longest)
    if not isinstance(content, list):
        raise Refused(400, "content must be a text or a list of parts", "messages", schema=True)
    tokens: list[int] = []
    for part in content:
        tokens += _part(part, longest)
    return tokens


def _part(part: Any, longest: int) -> list[int]:
    if isinstance(part, str):
        return tokens_of(part, longest)
    if not isinstance(part, dict):
        raise Refused(400, "a part of a content must be an object", "messages", schema=True)
    if isinstance(part.get("text"), str):
        return tokens_of(part["text"], longest)
    if part.get("type") == "tool_result":
        return content_tokens(part.get("content"), longest)
    if part.get("type") == "tool_use":
        return tokens_of(f"{part.get('name')} {json.dumps(part.get('input'))}", longest)
    return [IMAGE, *xxh64_digest(json.dumps(part).encode())]


@dataclass(frozen=True)
class Tool:
    """The tool that a sample has to call: its text becomes the first argument."""

    name: str
    argument: str

    @property
    def opening(self) -> str:
        return "{" + json.dumps(self.argument) + ': "'

    closing = '"}'

    def inside(self, text: str) -> str:
        """Sampled text as it stands within the arguments."""
        return json.dumps(text, ensure_ascii=False)[1:-1]

    def arguments(self, text: str) -> str:
        return self.opening + self.inside(text) + self.closing


def forced_tool(fields: Fields) -> Tool | None:
    """The tool that `tool_choice` makes the sample call: the named one, or with "required" the first."""
    tools = [tool.get("function", tool) for tool in fields.get("tools") or [] if isinstance(tool, dict)]
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") not in ("auto", "none"):
        wanted = choice.get("function", choice).get("name")
        tools = [tool for tool in tools if wanted is None or tool.get("name") == wanted]
        if not tools:
            raise Refused(400, f"tool_choice names {wanted!r}, which is not among the tools", "tool_choice")
    elif choice not in ("required", "any"):
        return None
    if not tools:
        raise Refused(400, "tool_choice needs tools", "tool_choice")
    schema = tools[0].get("parameters") or tools[0].get("input_schema") or {}
    return Tool(str(tools[0].get("name")), next(iter(schema.get("properties") or {}), "text"))
