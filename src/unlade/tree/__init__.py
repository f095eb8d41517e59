"""Materialised trees by key: made once, shared by everyone who needs them, removed when nobody does.

`DirTrees` keeps them in the directory of a store; `merge_into` makes one directory of several layers where
no overlay can be mounted. Called by `deliver`; stands on `store` for records and on `unpack` for content.
"""

from typing import TYPE_CHECKING

from unlade.lazy import lazily

if TYPE_CHECKING:
    from unlade.tree.checking import fsck
    from unlade.tree.context import needs_context, resolve_context
    from unlade.tree.dirtrees import DirStaging, DirTrees
    from unlade.tree.merge import DanglingLink, merge_into
    from unlade.tree.trees import Scratch, Staging, Tree, TreeKey, TreeStore
else:
    __getattr__ = lazily(
        __name__,
        {
            "context": "needs_context resolve_context",
            "dirtrees": "DirStaging DirTrees",
            "checking": "fsck",
            "merge": "DanglingLink merge_into",
            "trees": "Scratch Staging Tree TreeKey TreeStore",
        },
    )

__all__ = [
    "DanglingLink",
    "DirStaging",
    "DirTrees",
    "Scratch",
    "Staging",
    "Tree",
    "TreeKey",
    "TreeStore",
    "fsck",
    "merge_into",
    "needs_context",
    "resolve_context",
]
