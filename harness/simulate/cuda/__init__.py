"""Where Python code behaves otherwise on CUDA than on shape-only tensors: one file a reason."""
