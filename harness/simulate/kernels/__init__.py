"""What one operator does on CUDA: which kernel, which temporaries, which bytes."""
