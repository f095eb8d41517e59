"""When two nodes are equal, for a merge: by value, by text, or as kpt compares lists.

Three notions, because kpt has three: a scalar is its text (`1` equals `"1"`), a list without keys also counts
inner quoting and comments, and a whole resource counts everything but blank lines and columns.
"""

from unlade.packages.yamltext import Alias, Map, Node, Scalar, Seq
from unlade.packages.yamltext.nodes import comments_in, inline


def canonical(node: Node, *, flow_matters: bool) -> object:
    """The node with comments, quoting and order, without blank lines and columns: what kpt compares."""
    if isinstance(node, Scalar):
        return ("s", node.value, node.style, node.null, node.props)
    if isinstance(node, Alias):
        return ("a", node.raw)
    flow = node.flow is not None and flow_matters
    if isinstance(node, Map):
        return (
            "m",
            flow,
            node.props,
            tuple(
                [
                    (
                        comments_in(entry.lead),
                        entry.key.value,
                        entry.key.style,
                        canonical(entry.value, flow_matters=flow_matters),
                        entry.comment.strip(),
                        comments_in(entry.foot),
                    )
                    for entry in node.entries
                ]
            ),
        )
    return (
        "l",
        flow,
        node.props,
        tuple(
            [
                (
                    comments_in(item.lead),
                    canonical(item.value, flow_matters=flow_matters),
                    item.comment.strip(),
                    comments_in(item.foot),
                )
                for item in node.items
            ]
        ),
    )


def same_text(left: Node, right: Node) -> bool:
    """Equal for kpt: same values, comments, quoting and order."""
    return canonical(left, flow_matters=True) == canonical(right, flow_matters=True)


def same_values(left: Node | None, right: Node | None) -> bool:
    """Equal as a list is compared: outer style ignored, inner quoting not."""
    if left is None or right is None:
        return left is right
    return _values(left) == _values(right)


def _values(node: Node) -> object:
    shape = canonical(node, flow_matters=False)
    return shape[3] if isinstance(shape, tuple) and shape[0] in ("m", "l") else shape


def plain(node: Node | None) -> object:
    """The bare values: text, None, lists and dicts."""
    if node is None or node.null:
        return None
    if isinstance(node, Map):
        return {entry.name: plain(entry.value) for entry in node.entries}
    if isinstance(node, Seq):
        return [plain(item.value) for item in node.items]
    return node.value


def shown(node: Node | None) -> str | None:
    return None if node is None else inline(node) or "null"
