"""What one rank of several holds: parts of all weights, units that are whole for a while, DDP's buckets."""
