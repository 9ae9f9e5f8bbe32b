"""What happens in a process on a virtual GPU once it has imported torch."""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def begin():
    sys.path.insert(0, _HERE)
    try:
        if os.environ.get("VIRTUAL_GPU_VALUES") == "1":
            import virtual_gpu_values

            virtual_gpu_values.install()
    finally:
        sys.path.remove(_HERE)
