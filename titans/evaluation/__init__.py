"""Tasks on a model: what is asked, how answers are scored, and the results, which grow cell by cell."""
