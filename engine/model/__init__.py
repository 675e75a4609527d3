"""The device ring: model files, weights, the decoder and the runners; never imports anyio or the shell."""
