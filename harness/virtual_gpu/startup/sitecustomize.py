"""Python imports this file as it starts, because the folder is on PYTHONPATH. It waits until torch is
imported and then prepares it for a virtual GPU (virtual_gpu_start.py).

It imports nothing of harness, and runs the environment's own sitecustomize, which it hides.
"""

import atexit
import os
import re
import signal
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class _After:
    """A finder on sys.meta_path that calls a function of a file in this folder as soon as `module` was
    executed.

    The function gets the module. It is not called for a program that only looks for the module's spec.
    """

    def __init__(self, module, file, function):
        self.module, self.file, self.function = module, file, function

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        next_finders = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in next_finders)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                sys.meta_path.remove(self)
                sys.path.insert(0, _HERE)
                try:
                    file = __import__(self.file)
                finally:
                    sys.path.remove(_HERE)
                getattr(file, self.function)(module)

            spec.loader.exec_module = exec_module
        return spec


def _note_use():
    """Make a file in memory that this process, and every process that it starts, writes to when it begins to
    use the GPU. It is empty at the end of a program that never did."""
    file = os.memfd_create("virtual GPU")
    os.environ["VIRTUAL_GPU_USED"] = f"/proc/{os.getpid()}/fd/{file}"
    atexit.register(_say_if_unused, os.getpid(), file)


def _say_if_unused(process, file):
    if os.getpid() == process and not os.fstat(file).st_size and not hasattr(sys, "last_value"):
        print(
            "virtual GPU: this program never used it: no process of it began to use CUDA. If it can choose "
            "its device, choose cuda.",
            file=sys.__stderr__ or sys.stderr,  # a notebook's kernel loses the second at its end
        )


_MISSING_LIBRARY = re.compile(r"(lib(?:cu|nv|nccl)\w*\.so\.\d+)[\d.]*: cannot open shared object file")
_UNKNOWN = re.compile(r"undefined symbol: ((?:__)?(?:cuda[A-Z]|cu[A-Z]|cublas|nccl|nvml)\w*)")


def _sentence(error):
    """What the virtual GPU has to do with a library that could not be loaded; None where it has nothing."""
    if found := _MISSING_LIBRARY.search(str(error)):
        torch = sys.modules.get("torch")
        ours = f" (CUDA {torch.version.cuda})" if torch else ""
        return (
            f"a library needs {found[1]}, which is not here: it was built for another CUDA than "
            f"PyTorch's{ours}. On a GPU it would fail too. Install its build for this CUDA."
        )
    if found := _UNKNOWN.search(str(error)):
        return (
            f"there is no {found[1]} here. If it does not fail on a GPU, report it with the command, the "
            "versions that `harness doctor` prints, and this text."
        )
    return None


def _say_where(trace):
    """Print which line of the program a Ctrl-C interrupted, without the frames of Python and of libraries."""
    others = os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(_HERE)), "<frozen"
    where = ""
    while trace is not None:  # an import of `traceback` here would lose the signal as the exit status
        name = trace.tb_frame.f_code.co_filename
        is_generated = name == "<string>" and where  # by exec, as dataclasses do
        if not (is_generated or name.startswith(others) or "site-packages" in name):
            where = f" at {name}:{trace.tb_lineno}"
        trace = trace.tb_next
    print(f"virtual GPU: interrupted{where}.", file=sys.stderr)


def _explained(hook):
    """`hook`, an excepthook, with a sentence about the virtual GPU behind what it prints."""

    def excepthook(kind, error, traceback):
        if issubclass(kind, KeyboardInterrupt):  # Python then ends by the signal: 130 in a shell
            return _say_where(traceback)
        if getattr(error, "sigval", None) == signal.SIGINT:  # torchrun's, which would end with 1
            _say_where(traceback)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        hook(kind, error, traceback)
        sentence = _sentence(error) if isinstance(error, (OSError, ImportError)) else None
        if sentence:
            print(f"virtual GPU: {sentence}", file=sys.stderr)

    return excepthook


def _hand_on():
    """Import the sitecustomize that this one hides, if there is one."""
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]
    hidden = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError:
        sys.modules["sitecustomize"] = hidden


if os.environ.get("VIRTUAL_GPU"):
    if os.environ.pop("VIRTUAL_GPU_MAIN", None) == str(os.getpid()):
        _note_use()
    sys.excepthook = _explained(sys.excepthook)
    finders = [
        _After("torch", "virtual_gpu_start", "begin"),
        _After("torch.distributed.distributed_c10d", "virtual_gpu_start", "begin_distributed"),
        _After("transformers.modeling_utils", "virtual_gpu_weights", "begin_to_load"),
        _After("transformers.utils.hub", "virtual_gpu_weights", "begin_to_fetch"),
    ]
    if os.environ.get("VIRTUAL_GPU_VALUES") == "1":
        finders.append(_After("torch._dynamo.output_graph", "virtual_gpu_keys", "compile_without"))
        finders.append(_After("torch.nn.attention.flex_attention", "virtual_gpu_masks", "begin"))
    if os.environ.get("VIRTUAL_GPU_CLOCK") == "1":
        heuristics = "torch._inductor.runtime.triton_heuristics"
        finders.append(_After("triton.runtime.jit", "virtual_gpu_triton", "begin"))
        finders.append(_After(heuristics, "virtual_gpu_triton", "begin_compiled"))
    if os.environ.get("VIRTUAL_GPU_ALONE") == "1":
        planner, stage = "torch.distributed.checkpoint.default_planner", "torch.distributed.pipelining.stage"
        finders.append(_After(planner, "virtual_gpu_alone", "save_own_part"))
        finders.append(_After(stage, "virtual_gpu_alone", "answer_a_stage"))
    sys.meta_path[:0] = finders
_hand_on()
