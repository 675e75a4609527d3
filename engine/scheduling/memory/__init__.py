"""Which request holds which pages, and which pages come, stay and go; counts, never moves a byte."""
