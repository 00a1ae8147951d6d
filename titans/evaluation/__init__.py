"""What a model can do: what is measured, how answers are scored, and results that grow cell by cell."""
