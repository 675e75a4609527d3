"""The runner of a GPU and what it keeps there for rows, adapters and grammars; never what is for the CPU."""
