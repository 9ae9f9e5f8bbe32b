"""Where a simulation leaves a recording: requests aligned one by one, and replayed through the allocator."""
