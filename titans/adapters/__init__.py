"""A memory for a causal model that somebody else trained: a window of attention, and a memory of what left it."""
