"""What happens in a process on a virtual GPU once it has imported torch, and once it begins to compile."""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def begin(torch):
    sys.path.insert(0, _HERE)
    try:
        if os.environ.get("VIRTUAL_GPU_OUT"):
            import virtual_gpu_out

            virtual_gpu_out.install()
        if os.environ.get("VIRTUAL_GPU_VALUES") == "1":
            import virtual_gpu_values

            virtual_gpu_values.install()
            if "torch.distributed.distributed_c10d" in sys.modules:
                import virtual_gpu_collectives

                virtual_gpu_collectives.install()
    finally:
        sys.path.remove(_HERE)


def begin_to_compile(output_graph):
    import virtual_gpu_values

    virtual_gpu_values.compile_without(output_graph)


def begin_distributed(distributed_c10d):
    if "virtual_gpu_values" not in sys.modules:  # torch is still being imported: `begin` comes
        return
    sys.path.insert(0, _HERE)
    try:
        import virtual_gpu_collectives
    finally:
        sys.path.remove(_HERE)
    virtual_gpu_collectives.install()
