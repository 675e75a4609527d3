"""`H200`: measured on an NVIDIA H200 in whole chains of a model's layers, where kernels overlap their neighbours."""

from __future__ import annotations

from typing import Final

from headrace.ops.cuda.tuning.table import ANY, Span, Splits, Tuning

__all__ = ["H200"]

_FEW_TOKENS: Final = range(4097)
_MORE_TOKENS: Final = range(4097, ANY.stop)
_FEW = Span(range(1, 5), _FEW_TOKENS)

H200: Final = Tuning(
    chip="NVIDIA H200",
    is_measured=True,
    coded_vector_rows=range(1, 3),
    coded_rows=range(1, 65),
    coded_tile_rows=range(2, 65),
    coded_tile_programs=4 * 132,
    coded_pass_rows=range(65, 97),
    coded_many_rows=range(97, 1025),
    coded_wide_rows=64,
    vector_rows=range(1, 2),
    vector_norm_inputs=2048,
    even_rows=range(2, 65),
    even_weights=128 << 20,  # the output head is read as fast by Triton's kernel
    even_wide_tiles=2 * 132,
    even_wide_rows=32,
    few_rows=range(2, 65),
    few_rows_gated_outputs=8192,
    few_rows_early=16,
    few_rows_deep=32,
    few_rows_shared_bytes=160 << 10,
    splits=(Splits(32, 0, 4), Splits(64, 2048, 2)),
    tile_rows=range(2048, ANY.stop),  # with fewer rows, cuBLAS divides the work better
    expert_vector_rows=range(1, 5),  # not measured
    expert_tile_rows=((4, 16), (24, 32), (96, 64), (1 << 31, 128)),  # not measured
    expert_rows=range(5, ANY.stop),
    expert_float_rows=range(5, 65),
    expert_row_tiles=((8, 16), (20, 32), (1 << 31, 64)),
    expert_dense_rows=range(256, ANY.stop),
    expert_dense_tiles=((4, 16), (12, 32), (40, 64), (100, 128), (1 << 31, 256)),
    decode={
        "fused": (_FEW,),
        "even": (Span(range(4, ANY.stop)),),
        # Measured alone, XQA looks better than it is: FA2 overlaps with its neighbours, and XQA does not.
        "xqa": (Span(range(1, 4), _MORE_TOKENS),),
        "fa2": (Span(ANY),),
        "split": (Span(ANY),),
        "latent": (Span(ANY),),
    },
    decode_8_bits={
        "fused": (_FEW,),
        "even": (Span(range(8, ANY.stop)),),
        "xqa": (Span(range(1, 5), _MORE_TOKENS), Span(range(5, ANY.stop))),
        "fa2": (Span(ANY),),
        "split": (Span(ANY),),
    },
    decode_lines={"even": (Span(range(4, ANY.stop)),), "split": (Span(ANY),)},
    decode_many_lines={"even": (), "split": (Span(ANY),)},
    fused_programs=256,
    fused_splits=32,
    latent_programs=3 * 132,  # not measured
    update_norm_rows=128,
    adapter_rows=128,
    adapter_share=16,
)
