"""The server, which offers the questions as tools of the Model Context Protocol on stdin and stdout."""

import functools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.errors import HarnessError, InputError, needed
from harness.mcp.folders import Folders
from harness.mcp.questions import Questions
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
        from mcp_types import ToolAnnotations
    from harness.version import __version__

    server = MCPServer("harness", version=__version__, instructions=INSTRUCTIONS, log_level="ERROR")
    one_at_a_time = threading.Lock()

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
    for tool in questions.tools():
        server.add_tool(answering(tool), annotations=reading)
    sys.addaudithook(_no_network)
    server.run("stdio")


def _no_network(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse every connection, by whatever library: OFFLINE stops only those of Hugging Face."""
    if event in _REFUSED:
        raise InputError("this server reaches no network.")
