"""The device side: model files, weights, the decoder and the runners; never imports anyio or asynchronous code."""
