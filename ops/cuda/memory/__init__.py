"""GPU memory at fixed addresses, and writes to it; never decides what is stored where."""
