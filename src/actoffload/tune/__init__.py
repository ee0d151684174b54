"""The first passes of a model or a pipeline: what the ranks exchange, what is measured, and what follows from it."""
