"""WHEN: plans as pure data, and what they cost.  Nothing in here imports torch."""
