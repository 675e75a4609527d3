"""A small search: texts become vectors once, queries find the nearest, and the best are scored again.

python examples/embeddings.py [model folder or .gguf file]

Any model does; one that was made for it, such as all-MiniLM-L6-v2, finds what a question means.
"""

from __future__ import annotations

import sys

import anyio

from headrace.engine import Engine
from headrace.server.demo import demo_model

TEXTS = [
    "A headrace leads water to the wheel of a mill.",
    "Bread is baked from flour, water and salt.",
    "The moon takes about a month to go around the earth.",
    "Rivers carry sand and stones down to the sea.",
    "A loaf rises when yeast makes gas in the dough.",
]
QUERIES = ["How does a watermill get its water?", "Why does dough grow?"]


async def main(model: str) -> None:
    async with Engine(model) as engine:
        library = await engine.embed(TEXTS, truncate=True)
        print(f"{len(TEXTS)} texts, {library.vectors.shape[1]} dimensions, {library.usage.prompt_tokens} tokens")
        found = await engine.embed(QUERIES)
        cosines = found.vectors @ library.vectors.T  # vectors of length 1
        for query, row in zip(QUERIES, cosines, strict=True):
            best = row.argsort()[::-1][:2]
            scores = await engine.score(query, [TEXTS[place] for place in best])
            print(f"{query}  ({scores.method})")
            for place, score in zip(best, scores.scores, strict=True):
                print(f"  {score:.2f}  {TEXTS[place]}")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else str(demo_model()))
