"""Python imports this as it starts (its folder is on PYTHONPATH): a process is watched from its first call of
a module of torch on.

Nothing of harness is imported before: launchers and workers, which train nothing, start as they would.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch:
    """Finds torch as the other finders do, and sets the first hooks once it is imported, but not when a
    program only asks whether it is installed."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in behind)), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                sys.meta_path.remove(self)
                _note_recording(module.cuda.memory)
                _wait_for_a_loop()

            spec.loader.exec_module = exec_module
        return spec


def _note_recording(memory):
    """Keep the arguments with which the program records memory itself, for harness/measure/device_memory.py,
    which records beside it."""
    from functools import wraps

    original = memory._record_memory_history_impl

    @wraps(original)
    def record(*args, **kwargs):
        record.asked = args, kwargs
        return original(*args, **kwargs)

    record.asked = None
    memory._record_memory_history_impl = record


def _wait_for_a_loop():
    """Wait for the first call of a module or the first step of an optimizer; a process that runs out of
    memory before that says what it held."""
    from torch import OutOfMemoryError
    from torch.compiler import is_compiling
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    hooks = []
    process, before = os.getpid(), sys.excepthook

    def died(kind, error, traceback):
        before(kind, error, traceback)
        if isinstance(error, OutOfMemoryError) and os.getpid() == process:
            loops = _imported(_options())
            if loops is not None:
                loops.tell_shortage()

    def begins(caller, *_):
        if is_compiling():
            return
        for hook in hooks:
            hook.remove()
        if sys.excepthook is died:
            sys.excepthook = before
        if os.getpid() == process:
            _watch(caller)

    sys.excepthook = died
    hooks += [register_module_forward_pre_hook(begins), register_optimizer_step_pre_hook(begins)]


def _watch(caller):
    from pathlib import Path

    options = _options()
    loops = _imported(options)
    if loops is not None:
        steps = options["first"], options["last"]
        loops.watch_process(Path(options["out"]), options["command"], steps, caller)


def _options():
    import json

    return json.loads(os.environ["HARNESS_WATCH"])


def _imported(options):
    """harness.loops; None, with a sentence on stderr, where it cannot be imported in this environment."""
    sys.path.append(options["harness"])
    try:
        import harness.loops
    except ImportError as error:
        print(
            f"harness: this process is not watched: {sys.executable} cannot import harness ({error}). "
            "Install harness in the environment of the command.",
            file=sys.stderr,
        )
        return None
    finally:
        sys.path.remove(options["harness"])
    return harness.loops


def _hand_on():
    """Import the sitecustomize that this one hides, if there is one."""
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]
    hidden = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError:
        sys.modules["sitecustomize"] = hidden


if os.environ.get("HARNESS_WATCH"):
    sys.meta_path.insert(0, _AfterTorch())
_hand_on()
