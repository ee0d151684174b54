"""Every private PyTorch API that the package uses, each behind a feature check.

Strings that identify autograd nodes, classes of wrappers and functions of PyTorch are here too.
"""
