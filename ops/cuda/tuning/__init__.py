"""Where each kernel pays, by the GPU that it was measured on; nothing here says what a kernel can compute."""
