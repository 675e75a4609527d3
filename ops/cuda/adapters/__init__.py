"""Low-rank updates of adapters on CUDA; never loads an adapter or assigns one to a request."""
