"""Writes the API reference from docstrings, and the tables of names of the pages for people who come from other tools.

    python docs/reference/write.py

A test fails where a file is not what this writes. Sources are read, not imported, but for the tables of names.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "engine": ("headrace.engine", "An LLM engine in your own event loop, and `LLM` for scripts without one."),
    "testing": ("headrace.engine.testing", "Engines without a model, for the tests of an application."),
    "tools": ("headrace.engine.tools", "Tool calls and reasoning, read out of the text of a completion."),
    "server": ("headrace.server", "OpenAI's and Anthropic's API over HTTP or in process. Needs `headrace[server]`."),
}
OPTIONS_OF = {"EngineConfig": "ConfigOptions", "SamplingParams": "SamplingOptions"}
"""Class -> the `TypedDict` that describes its fields."""
GIVEN = {"Adapters", "Embeddings", "KvEvents", "OpenAITransport", "Scores", "TokenStream"}
"""Classes whose objects headrace makes and an application is given: their constructors are left out."""
OPAQUE = {"ByteTokenizer", "DrainingServer", "KvEvents", "ScriptedRunner", "ScriptedStep"}
"""Classes whose methods the engine or a library alone calls."""
NOT_LISTED = {
    "Adapters.close",
    "Adapters.known_to",
    "EngineInfo.of",
    "KvLoad.of",
    "OpenAITransport.handle_async_request",
    "ResponseFormat.described",
}
"""Public methods that other parts of headrace, or a library, call."""
TABLES = {
    "coming_from_vllm": ("vLLM", "vLLM"),
    "coming_from_openai": ("OpenAI", "OpenAI"),
    "coming_from_llama_cpp": ("llama-cpp-python", "llama-cpp-python"),
}
"""Page -> whose names its tables list, and how the tables call them."""
WIDTH = 100

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Found(NamedTuple):
    """A definition, and the module and body of statements that it stands in."""

    node: ast.stmt
    module: str
    body: list[ast.stmt]


@cache
def tree_of(module: str) -> ast.Module:
    """Parse the source of a module of headrace."""
    path = ROOT.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def find(module: str, name: str) -> Found | None:
    """Find where `name` of `module` is defined, following imports; None outside headrace."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            source = node.module or ""
            return find(source, name) if source.startswith("headrace.") else None
    for node in tree_of(module).body:
        if name in names_of(node):
            return Found(node, module, tree_of(module).body)
    return None


def names_of(node: ast.stmt) -> list[str]:
    """Names that a statement defines."""
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def exports(module: str) -> list[str]:
    """The names in `__all__` of a module."""
    node = next(node for node in tree_of(module).body if "__all__" in names_of(node))
    assert isinstance(node, ast.Assign)
    return list(ast.literal_eval(node.value))


@cache
def documented() -> frozenset[str]:
    """Names that have a section on one of the pages."""
    return frozenset(name for module, _ in PAGES.values() for name in exports(module))


def classes(module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    """A class and those of its bases in headrace that have no section of their own, each with its module."""
    yield module, node
    for base in node.bases:
        found = find(module, base.id) if isinstance(base, ast.Name) and base.id not in documented() else None
        if found is not None and isinstance(found.node, ast.ClassDef):
            yield from classes(found.module, found.node)


def is_error(module: str, node: ast.ClassDef) -> bool:
    """Whether a class is of headrace's tree of errors."""
    found = [find(module, base.id) for base in node.bases if isinstance(base, ast.Name)]
    above = [is_error(each.module, each.node) for each in found if each and isinstance(each.node, ast.ClassDef)]
    return node.name == "HeadraceError" or any(above)


def doc_behind(node: ast.stmt, body: list[ast.stmt]) -> str:
    """The string that stands behind an assignment and describes it."""
    following = body[body.index(node) + 1 :][:1]
    for each in following:
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str):
            return inspect.cleandoc(each.value.value)
    return ""


def markdown(doc: str) -> str:
    """A docstring with its sections `Args`, `Returns` and `Raises` as lists."""
    lines: list[str] = []
    section = ""
    for line in doc.splitlines():
        if match := re.fullmatch(r"(Args|Returns|Raises):", line):
            section = {"Args": "Arguments"}.get(match[1], match[1])
            lines += [f"**{section}**", ""]
        elif section in ("Arguments", "Raises") and (match := re.fullmatch(r"    ([*.\w]+): (.*)", line)):
            lines.append(f"- `{match[1]}`: {match[2]}")
        elif section:
            lines.append(re.sub(r"^ +", "" if section == "Returns" else "  ", line))
        else:
            lines.append(line)
    return "\n".join(lines)


def default(node: ast.expr, module: str) -> str:
    """A default as a reader may write it: private constants give their values."""
    if isinstance(node, ast.Name) and node.id.startswith("_"):
        found = find(module, node.id)
        if found is not None and isinstance(found.node, ast.Assign | ast.AnnAssign) and found.node.value is not None:
            return ast.unparse(found.node.value)
    return ast.unparse(node)


def parameters(arguments: ast.arguments, module: str) -> list[str]:
    """The parameters of a function as they are written, without `self` and `cls`."""
    positional = [*arguments.posonlyargs, *arguments.args]
    given = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)

    def one(arg: ast.arg, value: ast.expr | None, stars: str = "") -> str:
        text = stars + arg.arg + (f": {ast.unparse(arg.annotation)}" if arg.annotation else "")
        return text + (f" = {default(value, module)}" if value is not None else "")

    parts = [one(arg, value) for arg, value in zip(positional, given, strict=True) if arg.arg not in ("self", "cls")]
    if arguments.vararg:
        parts.append(one(arguments.vararg, None, "*"))
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [one(arg, value) for arg, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return parts + ([one(arguments.kwarg, None, "**")] if arguments.kwarg else [])


def signature(start: str, parts: list[str], end: str = "") -> str:
    """A fenced signature, one line for each parameter where it is long."""
    text = f"{start}({', '.join(parts)}){end}"
    if len(text) > WIDTH:
        text = f"{start}(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"
    return f"```python\n{text}\n```"


def function(node: Function, module: str, owner: str = "") -> str:
    """Signature and docstring of a function, or of a method of `owner`."""
    decorators = {ast.unparse(each) for each in node.decorator_list}
    returns = ast.unparse(node.returns) if node.returns else ""
    if "property" in decorators:
        head = f"```python\n{owner}.{node.name}: {returns}\n```"
    else:
        start = f"{'await ' * isinstance(node, ast.AsyncFunctionDef)}{owner + '.' if owner else ''}{node.name}"
        head = signature(start, parameters(node.args, module), f" -> {returns}" if returns else "")
    return f"{head}\n\n{markdown(ast.get_docstring(node) or '')}"


def field_line(node: ast.AnnAssign, body: list[ast.stmt], name: str) -> str:
    """One item of a list of fields."""
    value = "" if node.value is None or "(" in ast.unparse(node.value) else f" = {ast.unparse(node.value)}"
    kind = re.sub(r"^Annotated\[(.*?), .*\](.*)$", r"\1\2", ast.unparse(node.annotation))
    doc = doc_behind(node, body).replace("\n", "\n  ")
    return f"- `{name}: {kind}{value}`" + (f": {doc}" if doc else "")


def fields(module: str, node: ast.ClassDef) -> list[str]:
    """A list item for each public field of a class and of its bases."""
    described = find("headrace.engine.options", OPTIONS_OF[node.name]) if node.name in OPTIONS_OF else None
    if described is not None and isinstance(described.node, ast.ClassDef):
        module, node = described.module, described.node
    seen: dict[str, str] = {}
    for _, each in classes(module, node):
        for line in each.body:
            for name in names_of(line) if isinstance(line, ast.AnnAssign) else ():
                if isinstance(line, ast.AnnAssign) and not name.startswith("_") and "ClassVar" not in ast.dump(line):
                    seen.setdefault(name, field_line(line, each.body, name))
    return list(seen.values())


def methods(module: str, node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Name and text of each public method and property of a class and of its bases."""
    seen: set[str] = set()
    for home, each in classes(module, node) if node.name not in OPAQUE else ():
        for line in each.body:
            if not isinstance(line, Function) or line.name.startswith("_") or line.name in seen:
                continue
            if f"{node.name}.{line.name}" in NOT_LISTED:
                continue
            if not {"overload", f"{line.name}.setter"} & {ast.unparse(mark) for mark in line.decorator_list}:
                seen.add(line.name)
                yield line.name, function(line, home, node.name)


def entry(name: str, found: Found) -> str:
    """The section of one exported name."""
    node, module = found.node, found.module
    if isinstance(node, Function):
        return f"## {name}\n\n{function(node, module)}"
    if not isinstance(node, ast.ClassDef):
        return f"## {name}\n\n```python\n{ast.unparse(node)}\n```\n\n{markdown(doc_behind(node, found.body))}"
    parts = [f"## {name}"]
    is_made = name not in GIVEN and not is_error(module, node)
    own = (line for _, each in classes(module, node) for line in each.body if isinstance(line, Function) and is_made)
    init = next(
        (line for line in own if line.name == "__init__" and len(line.args.args + line.args.kwonlyargs) > 1), None
    )
    bases = ", ".join(ast.unparse(base) for base in node.bases if not ast.unparse(base).startswith("_"))
    listed = fields(module, node)
    if init is not None:
        parts.append(signature(name, parameters(init.args, module)))
    else:
        parts.append(f"```python\nclass {name}{f'({bases})' if bases else ''}\n```")
    parts.append(markdown(ast.get_docstring(node) or ""))
    if init is not None:
        parts.append(markdown(ast.get_docstring(init) or ""))
    if listed:
        parts.append("**Options**" if name in OPTIONS_OF else "**Fields**")
        parts.append("\n".join(listed))
    for method, text in methods(module, node):
        parts.append(f"### {name}.{method}\n\n{text}")
    return "\n\n".join(part for part in parts if part)


def page(module: str, about: str) -> str:
    """One page of the reference."""
    names = sorted(exports(module), key=str.lower)
    found = {name: find(module, name) for name in names}
    text = [f"# {module}", about, "`docs/reference/write.py` writes this page from the docstrings."]
    text += [" · ".join(f"[{name}](#{name.lower()})" for name in names)]
    text += [entry(name, each) for name, each in found.items() if each is not None]
    return "\n\n".join(text) + "\n"


def name_tables(whose: str, title: str) -> str:
    """Tables of the names of options that people bring, as the engine understands or answers them."""
    from headrace.engine import EngineConfig, SamplingParams
    from headrace.engine.known_names import ENGINE_NAMES, SAMPLING_NAMES, SYNONYMS

    def table(names: Mapping[str, str], known: Mapping[str, object]) -> list[str]:
        said = {name: f"`{meant}`" if meant in known else meant for name, meant in names.items()}
        return [f"| {title} | headrace |", "|---|---|", *(f"| `{name}` | {meant} |" for name, meant in said.items())]

    text: list[str] = []
    for heading, table_of, model in (
        ("Options of the engine", ENGINE_NAMES, EngineConfig),
        ("Sampling parameters", SAMPLING_NAMES, SamplingParams),
    ):
        names = dict(table_of.get(whose, {}))
        if whose == "vLLM" and model is EngineConfig:
            same = {name: f"`{ours}`; `{name}` is understood too" for name, ours in SYNONYMS.items()}
            names = {**same, **names}
        if names:
            text += [f"### {heading}", "", *table(names, model.model_fields), ""]
    return "\n".join(text).rstrip()


def with_tables(text: str, tables: str) -> str:
    """A page with `tables` between its marks."""
    marks = r"(<!-- names -->\n).*?(\n<!-- end of names -->)"
    return re.sub(marks, lambda mark: f"{mark[1]}\n{tables}\n{mark[2]}", text, flags=re.DOTALL)


def files() -> dict[Path, str]:
    """Every file that this writes, with its text."""
    written = {ROOT / "docs/reference" / f"{name}.md": page(*about) for name, about in PAGES.items()}
    for name, (whose, title) in TABLES.items():
        path = ROOT / "docs" / f"{name}.md"
        written[path] = with_tables(path.read_text(encoding="utf-8"), name_tables(whose, title))
    return written


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
