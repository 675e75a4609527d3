"""Page ownership: which request holds which pages, and which pages are evicted or kept; counts, never moves a byte."""
