"""Rules for Python code that behaves differently on CUDA than on shape-only tensors, a file for each
reason."""
