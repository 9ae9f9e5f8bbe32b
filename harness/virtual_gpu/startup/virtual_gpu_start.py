"""What happens in a process on a virtual GPU once it has imported torch."""

import os


def begin():
    if os.environ.get("VIRTUAL_GPU_VALUES") == "1":
        pass
