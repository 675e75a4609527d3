"""Numeric operations of a decoder step, one folder for each device; knows no model, scheduler or request.

`headrace.ops.cpu.block` and `headrace.ops.cuda.block` hold the operations of a layer. `headrace.ops.paged` holds the
values that both take, and `headrace.ops.reference` slow versions that tests compare with.
"""
