"""A model of PyTorch's CUDA caching allocator, and of its settings."""
# pyright: reportUnusedImport=false

from harness.allocator.addresses import kRoundLarge
from harness.allocator.allocator import Allocator, AllocatorOutOfMemory
from harness.allocator.blocks import Block
from harness.allocator.memory_stats import snapshot_segments
from harness.allocator.settings import (
    Settings,
    allocator_settings,
    kLargeBuffer,
    kMinLargeAlloc,
    kSmallBuffer,
    kSmallSize,
    parse_settings,
)
