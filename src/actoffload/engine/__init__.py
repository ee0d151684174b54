"""HOW: carrying a plan out on the tensors that autograd saves."""
