"""Models without a family: the transformers library's own modules compute their layers, over headrace's pages."""
