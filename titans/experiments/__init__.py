"""The paper's experiments: each trains and measures several models, and writes tables, figures and pictures."""
