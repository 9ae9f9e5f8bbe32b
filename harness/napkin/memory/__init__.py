"""What is in memory at each moment of a step, and the largest of them."""
