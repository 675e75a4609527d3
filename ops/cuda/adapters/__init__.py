"""Low-rank updates of adapters on CUDA; never loads an adapter and never decides which request has which."""
