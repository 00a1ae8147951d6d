"""The lab: several models, several seeds, one report."""
