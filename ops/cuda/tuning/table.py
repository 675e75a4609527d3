"""`Tuning`: the numbers that choose between kernels on one GPU, and divide their work; never a limit of a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["ANY", "Span", "Splits", "Tuning"]

ANY = range(1, 1 << 62)


class Span(NamedTuple):
    """Batches for which attention in decodes pays."""

    rows: range
    tokens: range = ANY
    """Tokens of all rows' contexts together."""

    def has(self, rows: int, tokens: int) -> bool:
        """Return whether a batch of `rows` rows with `tokens` tokens belongs to the span."""
        return rows in self.rows and tokens in self.tokens


class Splits(NamedTuple):
    """Splits of a product's inner dimension, where its outputs alone do not fill the GPU."""

    most_tiles: int
    """Most tiles of 64 outputs for these splits."""
    fewest_inputs: int
    splits: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """The numbers of one GPU. Rows are those of a step, features those of a product."""

    chip: str
    """Name of the GPU that the numbers were measured on."""
    is_measured: bool
    """Whether that is the GPU at hand, rather than the one that stands for all that nobody measured."""
    coded_vector_rows: range
    """Rows for products with codes without tensor cores, where those of `coded_rows` cannot be had."""
    coded_rows: range
    """Rows for products that bring codes to tensor cores as they are read."""
    coded_tile_rows: range
    """Rows for Triton's products with codes by tensor cores, where those of `coded_rows` cannot be had."""
    coded_tile_programs: int
    """Programs up to which the inner dimension of such a product is split."""
    coded_pass_rows: range
    """Rows for which that is done in passes."""
    coded_many_rows: range
    """Rows for products that bring codes to tensor cores in tiles of 128 to 256 rows."""
    coded_wide_rows: int
    """Most rows for which such products take tiles of 128 lines of codes: with more, their inputs take too long."""
    vector_rows: range
    """Rows for products without tensor cores."""
    vector_norm_inputs: int
    """Most inputs for which such a product computes the norm before it: every program computes it again."""
    even_rows: range
    """Rows for products whose multiprocessors all read for the same time."""
    even_weights: int
    """Most elements of a weight for these products."""
    even_wide_tiles: int
    """Fewest tiles of 64 outputs for tiles twice as wide: every multiprocessor must get one."""
    even_wide_rows: int
    """Most rows for which tiles twice as wide do not pay."""
    few_rows: range
    """Rows for Triton's products, which read each weight once."""
    few_rows_gated_outputs: int
    """Fewest gates for which Triton's product with the activation inside saves enough traffic."""
    few_rows_early: int
    """Most rows for which Triton's gated product reads its first weights before it waits."""
    few_rows_deep: int
    """Most rows for tiles of 256 inputs instead of 128."""
    few_rows_shared_bytes: int
    """Shared memory of a block from which tiles of 128 inputs have five stages instead of four."""
    splits: tuple[Splits, ...]
    """The first that fits gives the splits of a product of few rows; if none fits, it is not split."""
    tile_rows: range
    """Rows for products of gates and ups in which arithmetic is the limit."""
    expert_vector_rows: range
    """Tokens whose experts are computed without tensor cores, each token's by themselves."""
    expert_tile_rows: tuple[tuple[int, int], ...]
    """Rows of a tile of an expert's tokens, behind the most tokens that an expert has on average for them, in ascending
    order; the last is for all beyond."""
    expert_rows: range
    """Tokens whose experts csrc/ computes, if they are in codes."""
    expert_float_rows: range
    """The same for 8-bit floats, by which tokens beyond these are multiplied as 8-bit floats."""
    expert_row_tiles: tuple[tuple[int, int], ...]
    """Rows of a tile of these, 16, 32 or 64, in the form of `expert_tile_rows`."""
    expert_dense_rows: range
    """Tokens whose experts csrc/ computes, if they are dense."""
    expert_dense_tiles: tuple[tuple[int, int], ...]
    """Rows of a tile of these, 16 or a multiple of 32 up to 256, in the form of `expert_tile_rows`."""
    decode: Mapping[str, tuple[Span, ...]]
    """Batches for which each way to attend in decodes pays, with a cache of 16 bits."""
    decode_8_bits: Mapping[str, tuple[Span, ...]]
    """The same with a cache of 8 bits."""
    decode_lines: Mapping[str, tuple[Span, ...]]
    """Batches of rows with several lines for which a way pays that attends for all of these at once; in others, lines
    are rows of their own. For up to 16 query heads of all lines and a key head, a tile of the tensor cores."""
    decode_many_lines: Mapping[str, tuple[Span, ...]]
    """The same for more."""
    fused_programs: int
    """Number of programs of attention in decodes of few rows."""
    fused_splits: int
    """Most programs for one row and key head."""
    latent_programs: int
    """Number of programs of attention to latent vectors in decodes, up to which rows are cut into shares."""
    update_norm_rows: int
    """Most rows for which the norm adds an adapter's update: a program for each row, while all run in one wave."""
    adapter_rows: int
    """Fewest rows with adapters for which reading an adapter once for several rows pays."""
    adapter_share: int
    """Fewest rows for each adapter for which that pays."""

    def splits_of(self, outputs: int, inputs: int) -> int:
        """Return the splits of the inner dimension for a product of few rows."""
        tiles = -(-outputs // 64)
        return next(
            (each.splits for each in self.splits if tiles <= each.most_tiles and inputs >= each.fewest_inputs), 1
        )

    def coded_splits_of(self, outputs: int, inputs: int, rows: int, *, gated: bool) -> tuple[int, bool]:
        """Return the splits of the inner dimension for a product with codes, and whether its tiles have 128 lines."""
        is_wide, splits = rows <= self.coded_wide_rows, self.splits_of(outputs, inputs)
        if gated or not is_wide:
            return (1 if gated else splits), is_wide
        return (splits, False) if splits > 1 else (2, True)
