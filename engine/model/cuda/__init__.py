"""The runner of a GPU and its state of rows, adapters and grammars; never imports CPU-only code."""
