"""Numeric operations of a decoder step, one folder a device; never a model, a scheduler or a request.

`headrace.ops.cpu.block` and `headrace.ops.cuda.block` have what a layer asks of either device. `headrace.ops.paged`
holds the values that both take, and `headrace.ops.reference` the slow truth for tests.
"""
