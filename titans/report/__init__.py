"""Sections, tables, plots, statistics and pages of results; knows nothing of models."""
