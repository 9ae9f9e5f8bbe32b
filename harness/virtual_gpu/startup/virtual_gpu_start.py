"""What happens in a process on a virtual GPU once it has imported torch, and once it begins to compile."""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def begin(torch):
    sys.path.insert(0, _HERE)
    try:
        if os.environ.get("VIRTUAL_GPU_VALUES") == "1":
            import virtual_gpu_values

            virtual_gpu_values.install()
    finally:
        sys.path.remove(_HERE)


def begin_to_compile(output_graph):
    import virtual_gpu_values

    virtual_gpu_values.compile_without(output_graph)
