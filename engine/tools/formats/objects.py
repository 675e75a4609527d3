"""`objects`: the shapes of calls that are written as JSON objects; never reads one."""

from __future__ import annotations

import json
from dataclasses import replace

from headrace.engine.tools.shapes import CallShape

__all__ = ["objects"]


def objects(shapes: tuple[CallShape, ...], key: str, before: str = "", after: str = "") -> tuple[CallShape, ...]:
    """Return the shape of each call as an object of name and arguments."""
    return tuple(
        replace(shape, before=f'{before}{{"name": {json.dumps(shape.name)}, "{key}": ', after="}" + after)
        for shape in shapes
    )
