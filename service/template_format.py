"""Whether a chat template loops over a message's content: it is then given a list of parts, else one string.

Written after `vllm.renderers.hf._detect_content_format`, which decides this from the template's syntax tree.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes


def reads_content_as_list(tree: nodes.Template) -> bool:
    """True for the format that vLLM calls "openai", False for "string"."""
    messages = set(_aliases_of_messages(tree))
    items = set(_loop_targets(tree, messages))
    bound = _content_parameters(tree, items)
    in_macros = {id(loop) for macro in tree.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, item, "content") for item in items):
            return True
        if not isinstance(loop.iter, nodes.Name):
            continue
        if loop.iter.name in bound.get(id(loop), set()) or (loop.iter.name == "content" and id(loop) not in in_macros):
            return True
    return False


def _aliases_of_messages(tree: nodes.Template) -> Iterator[str]:
    """`messages`, and every variable that is set from it."""
    pending, seen = ["messages"], set[str]()
    while pending:
        name = pending.pop(0)
        if name in seen:
            continue
        seen.add(name)
        yield name
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _reads(assign.node, name, None):
                pending.append(assign.target.name)


def _loop_targets(tree: nodes.Template, sources: set[str]) -> Iterator[str]:
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name, None) for name in sources):
            yield loop.target.name


def _content_parameters(tree: nodes.Template, items: set[str]) -> dict[int, set[str]]:
    """For each loop in a macro, the macro's parameters that are somewhere given a message's content."""
    bound: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        names = {
            name
            for call in tree.find_all(nodes.Call)
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name
            for name, value in _arguments(macro, call)
            if any(_reads(value, item, "content") for item in items)
        }
        for loop in macro.find_all(nodes.For):
            bound[id(loop)] = names
    return bound


def _arguments(macro: nodes.Macro, call: nodes.Call) -> Iterator[tuple[str, nodes.Expr]]:
    parameters = [parameter.name for parameter in macro.args]
    yield from zip(parameters, call.args, strict=False)
    for keyword in call.kwargs:
        if isinstance(keyword, nodes.Keyword) and keyword.key in parameters:
            yield keyword.key, keyword.value


def _reads(node: nodes.Node | None, variable: str, key: str | None) -> bool:
    """Whether `node` is the variable (or its `key`), perhaps filtered, tested or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _reads(node.node, variable, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, variable, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable
    if isinstance(node, nodes.Getitem):
        return _reads(node.node, variable, None) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _reads(node.node, variable, None) and node.attr == key
