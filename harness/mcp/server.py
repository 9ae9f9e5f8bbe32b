"""The server, which offers the questions as tools of the Model Context Protocol on stdin and stdout."""

import functools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.errors import HarnessError, InputError, nearest, needed, wrong_value
from harness.mcp.folders import Folders
from harness.mcp.questions import Questions
from harness.recipe import Recipe
from harness.system import recipes_folder

INSTRUCTIONS = (
    "How much GPU memory and time a fine-tuning recipe takes, and where each byte goes. Ask `napkin` for an "
    "estimate in milliseconds, `simulate` for memory to the byte, `fit` for what fits a GPU, `hardware` for "
    "which GPU, `shard` for several, `formula` for the terms of a peak, and `report`, `snapshot` and `diff` "
    "about runs that are in this server's folders. GiB is 2**30 bytes."
)
"""What the protocol tells the language model about the server."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Variables of the environment by which libraries reach no network."""
LEAVES_NOTHING = {
    "GIT_OPTIONAL_LOCKS": "0",  # a profile asks git for the commit, and git shall not refresh its index
    "HARNESS_CACHE": os.devnull,  # which is no folder, so that no formula is written
    "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir(),  # a folder that exists; torch makes its own otherwise
}
"""Variables of the environment by which an answer leaves no file behind."""
_REFUSED = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")
"""Python's audit events of reaching a network."""


def serve(folders: Sequence[Path]) -> None:
    """Answer questions about `folders` on stdin and stdout until stdin ends.

    Raises InputError for what is no folder, and MissingDependency without the SDK.
    """
    questions = Questions(Folders(folders, recipes_folder()))
    os.environ.update(OFFLINE | LEAVES_NOTHING)
    sys.dont_write_bytecode = True
    with needed("mcp", "mcp", "`harness mcp`"):
        from mcp.server.mcpserver import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
        from mcp.server.mcpserver.tools import Tool
        from mcp_types import ToolAnnotations
    from harness.version import __version__

    one_at_a_time = threading.Lock()

    class Strict(Tool):
        """A tool that refuses in a sentence what it does not take, and what the SDK would leave out."""

        async def run(self, arguments: dict[str, Any], *others: Any, **options: Any) -> Any:
            if unknown := _unknown(arguments, self.parameters["properties"]):
                raise ToolError(unknown)
            try:
                return await super().run(arguments, *others, **options)
            except ToolError as error:
                if not isinstance(error.__cause__, ValidationError):
                    raise
                wrong = error.__cause__.errors(include_url=False)[0]
                raise ToolError(f"{wrong['loc'][0]}{wrong_value(wrong)}") from None

    def answering(question: Callable[..., Any]) -> Callable[..., Any]:
        """The question, one at a time, with its errors as those of the protocol."""

        @functools.wraps(question)
        def answer(*arguments: Any, **options: Any) -> Any:
            with one_at_a_time:  # a simulation replaces parts of torch while it runs
                try:
                    return question(*arguments, **options)
                except HarnessError as error:
                    raise ToolError(str(error)) from None
                except MemoryError:
                    raise ToolError(
                        "the memory of this machine does not suffice for that question."
                    ) from None

        return answer

    reading = ToolAnnotations(read_only_hint=True, destructive_hint=False, open_world_hint=False)
    tools: list[Tool] = []
    for question in questions.tools():
        tool = Strict.from_function(answering(question), annotations=reading)
        tool.parameters["additionalProperties"] = False
        tools.append(tool)
    server = MCPServer(
        "harness", version=__version__, instructions=INSTRUCTIONS, log_level="ERROR", tools=tools
    )
    sys.addaudithook(_no_network)
    server.run("stdio")


def _unknown(given: Collection[str], known: Collection[str]) -> str:
    """What to say of the first argument that is not `known`; empty if all are."""
    name = next((name for name in given if name not in known), None)
    if name is None:
        return ""
    if name in Recipe.model_fields and "overrides" in known:
        return f"{name} is a field of the recipe: give it in overrides, {{'{name}': ...}}."
    return f"there is no argument {name}.{nearest(name, known)} There are {', '.join(known) or 'none'}."


def _no_network(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse every connection, by whatever library: OFFLINE stops only those of Hugging Face."""
    if event in _REFUSED:
        raise InputError("this server reaches no network.")
