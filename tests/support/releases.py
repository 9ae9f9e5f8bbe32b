"""What differs for tests between the releases of the support window."""

import transformers
from packaging.version import Version

ANGLES_BY_PRODUCT = Version(transformers.__version__) < Version("5.19")
"""The angles of rotary embeddings are a matrix product, later an elementwise one."""
