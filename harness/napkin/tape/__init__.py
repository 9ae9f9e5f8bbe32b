"""What a forward pass computes and autograd keeps, operation by operation."""
