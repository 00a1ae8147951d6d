"""Tasks that show what a memory holds, benchmarks, and their reports."""
