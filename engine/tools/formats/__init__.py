"""The formats in which models write tool calls, a file each; machine.py reads the text, and registry.py names them."""
