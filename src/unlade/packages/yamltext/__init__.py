"""YAML as text that can be edited: parse to a lossless tree, change a field, render the rest untouched.

A merge must keep what it does not touch byte for byte: comments, blank lines, quoting, key order. Loading
and dumping cannot promise that, and a general round-trip loader needs 18 s for 2,000 resources where
this one needs about one. So the tree here keeps every byte of its source: rendering an unchanged tree gives
the source back. It reads the block YAML that people and tools write for Kubernetes; whatever it
does not (complex keys, directives, comments inside flow collections) is normalised once through ruamel.yaml
and read again. Used by the packages room only. Values are text: kpt compares text, never resolved types.
"""

from unlade.packages.yamltext.documents import parse_documents
from unlade.packages.yamltext.flow import YamlSyntaxError
from unlade.packages.yamltext.nodes import Alias, Document, Entry, Item, Map, Node, Scalar, Seq, clone, shift
from unlade.packages.yamltext.scalars import is_null_text, render_scalar

__all__ = [
    "Alias",
    "Document",
    "Entry",
    "Item",
    "Map",
    "Node",
    "Scalar",
    "Seq",
    "YamlSyntaxError",
    "clone",
    "is_null_text",
    "parse_documents",
    "render_scalar",
    "shift",
]
