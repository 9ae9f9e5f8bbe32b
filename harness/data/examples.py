"""Reads a row's fields as an Example, in the forms in which people keep examples. Imports no torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from harness.errors import InputError
from harness.system import is_array, is_object

FORMS = (
    "`text`; `prompt` and `completion`; `messages`; `conversations` (ShareGPT); "
    "or `instruction` and `output` (Alpaca)"
)
MOST_MESSAGES = 1000
"""The most messages of a conversation: each turn may be rendered with all messages before it."""
_SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("function_response", "observation", "tool"), "tool"),
}
# github.com/tatsu-lab/stanford_alpaca, README: the two prompts its models were trained with
_ALPACA = (
    "Below is an instruction that describes a task{context}. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
_ALPACA_CONTEXT = ", paired with an input that provides further context"


class Example(NamedTuple):
    """One document: a text, or a conversation."""

    text: str = ""
    """The text that the model learns to write."""
    prompt: str = ""
    """Text before it, which the model reads and does not learn to write."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The messages of a conversation, each with role and content. The model learns the assistant's turns."""
    tools: tuple[Any, ...] = ()
    """JSON schemas of the functions that the assistant may call."""
    num_given: int = 0
    """How many messages, from the first on, are read and not learned, whoever wrote them."""
    where: str = ""
    """The file and line of a conversation, for error messages."""


def read_example(fields: Mapping[str, Any], where: str) -> Example:
    """The example in a row's `fields`. Raises InputError that begins with `where` and says the fix."""
    _refuse_other_tasks(fields, where)
    if "text" in fields:
        return Example(string_of(fields, "text", where))
    if "messages" in fields:
        return _conversation(fields, "messages", where)
    if "conversations" in fields:
        return _conversation(fields, "conversations", where)
    if "prompt" in fields and "completion" in fields:
        if isinstance(fields["prompt"], list) or isinstance(fields["completion"], list):
            return _answered(fields, where)
        return Example(string_of(fields, "completion", where), string_of(fields, "prompt", where))
    if "instruction" in fields and "output" in fields:
        return _alpaca(fields, where)
    found = ", ".join(repr(name) for name in list(fields)[:8]) or "nothing"
    raise InputError(f"{where} lacks the fields to train on: it has {found}, and needs {FORMS}.")


def _refuse_other_tasks(fields: Mapping[str, Any], where: str) -> None:
    """Raise InputError for fields of preference data, which name the task to set."""
    if "chosen" in fields and "rejected" in fields:
        found = "`chosen` and `rejected`, a better and a worse answer: preference training (DPO, ORPO)"
        tasks = "dpo, orpo or reward"
    elif "completion" in fields and isinstance(fields.get("label"), bool):
        found = "`completion` and `label`, an answer that is marked good or bad: preference training (KTO)"
        tasks = "kto"
    else:
        return
    raise InputError(
        f"{where} has {found}. task: sft trains on one text: set task: {tasks}, or keep the prompt and the "
        "good answer, as `prompt` and `completion`."
    )


def _alpaca(fields: Mapping[str, Any], where: str) -> Example:
    """An instruction with Alpaca's own prompt around it, and its output, which is learned."""
    context = string_of(fields, "input", where) if fields.get("input") is not None else ""
    prompt = _ALPACA.format(
        context=_ALPACA_CONTEXT if context else "",
        instruction=string_of(fields, "instruction", where),
        input=f"### Input:\n{context}\n\n" if context else "",
    )
    return Example(string_of(fields, "output", where), prompt)


def _conversation(fields: Mapping[str, Any], field: str, where: str) -> Example:
    messages = messages_of(fields[field], field, where)
    return Example(messages=messages, tools=tools_of(fields, where), where=where)


def _answered(fields: Mapping[str, Any], where: str) -> Example:
    """A prompt and a completion that are messages. The assistant's turns in the completion are learned."""
    prompt = messages_of(fields["prompt"], "prompt", where)
    completion = messages_of(fields["completion"], "completion", where)
    tools = tools_of(fields, where)
    return Example(messages=prompt + completion, tools=tools, num_given=len(prompt), where=where)


def messages_of(value: Any, field: str, where: str) -> tuple[Mapping[str, Any], ...]:
    """The messages of a conversation, each with role and content; `value` is that of the row's `field`.
    Raises InputError that begins with `where`."""
    if not is_array(value) or not value:
        kind = "empty" if value == [] else type(value).__name__
        raise InputError(
            f"{where}: `{field}` is {kind}, not a list of messages. "
            'Give for example [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}].'
        )
    if len(value) > MOST_MESSAGES:
        raise InputError(
            f"{where}: `{field}` has {len(value):,} messages, and at most {MOST_MESSAGES:,} are read. "
            "Cut the conversation into several."
        )
    return tuple(_message(message, f"{where}: `{field}`[{i}]") for i, message in enumerate(value))


def _message(message: Any, where: str) -> Mapping[str, Any]:
    if not is_object(message):
        raise InputError(f"{where} is {type(message).__name__}, not an object with role and content.")
    if "role" not in message and "from" in message:
        return _from_sharegpt(message, where)
    role = string_of(message, "role", where) if "role" in message else None
    if role is None:
        raise InputError(f"{where} has no `role`. Say who speaks: system, user, assistant or tool.")
    rest = {name: value for name, value in message.items() if name not in ("role", "content")}
    content = message.get("content")
    if is_array(content):
        content = "".join(_part(part, where) for part in content)
    elif content is not None:
        content = string_of(message, "content", where)
    elif not rest.get("tool_calls"):
        raise InputError(f"{where} has no `content`. Give text there.")
    return {"role": role, "content": content, **rest}


def _from_sharegpt(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    speaker = string_of(message, "from", where)
    if speaker not in _SHAREGPT_ROLES:
        known = ", ".join(_SHAREGPT_ROLES)
        raise InputError(f"{where} is from {speaker!r:.40}, who is not known here. Write one of {known}.")
    if "value" not in message:
        raise InputError(f"{where} has no `value`. Give what was said there.")
    return {"role": _SHAREGPT_ROLES[speaker], "content": string_of(message, "value", where)}


def _part(part: Any, where: str) -> str:
    """The text of one part of a message's content."""
    if isinstance(part, str):
        return part
    if is_object(part) and part.get("type", "text") == "text" and "text" in part:
        return string_of(part, "text", where)
    kind = part.get("type") if is_object(part) else type(part).__name__
    raise InputError(f"{where} holds {kind!r:.40}. Recipes train on text alone: leave such messages out.")


def tools_of(fields: Mapping[str, Any], where: str) -> tuple[Any, ...]:
    """The row's JSON schemas of functions; empty without any. Raises InputError that begins with `where`."""
    tools: Any = fields.get("tools") or []
    if not is_array(tools):
        raise InputError(f"{where}: `tools` is {type(tools).__name__}, not a list of JSON schemas.")
    return tuple(tools)


def string_of(fields: Mapping[str, Any], field: str, where: str) -> str:
    """The row's text in `field`. Raises InputError that begins with `where` for what is no Unicode text."""
    value = fields[field]
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise InputError(f"{where}: `{field}` is {kind}, not a string. Give text there.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: `{field}` is not Unicode text ({error.reason}). Repair it.") from None
    return value
