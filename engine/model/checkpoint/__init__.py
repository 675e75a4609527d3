"""Model files: their headers, names and weights; never a runner and never what runs a model."""
