"""Numeric operations of a decoder step, one module a device; never a model, a scheduler or a request.

Import the module that fits the device: `headrace.ops.cpu` and `headrace.ops.linear` for the CPU; `headrace.ops.paged`
holds the values that both kinds of device take, and `headrace.ops.reference` the slow truth for tests.
"""
