"""Values that autograd saved and that were dropped are made again in backward, by the operators that made them."""
