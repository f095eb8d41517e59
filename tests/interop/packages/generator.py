"""Seeded package trees with independent edits on both sides: the cases of the differential test.

case(seed) is a pure function of its seed: base, local and upstream files of one small package. The local
side is written as a user would leave it after `get` (marks included only where a rename needs them: update
adds the others). Edits cover values, deletions, additions, nulls, quoting, comments, order, keyed lists and
their odd keys, whole documents, files that are not KRM, and the Kptfile; from NESTED on also sub-packages of
the package. What makes kpt fail is left out, because one failure aborts a whole bundle: the outcome table
has those cases.
"""

import copy
import random
from dataclasses import dataclass, field

# Seeds from here on have sub-packages of their own.
NESTED = 2000
WORDS = ("alpha", "beta", "gamma", "delta", "omega", "sigma")
# Plain scalars that YAML 1.1 and 1.2 readers, or kpt's quoting, treat differently.
ODD = (
    "1",
    "0",
    "007",
    "1.5",
    "true",
    "yes",
    "on",
    "n",
    "0x1f",
    "1e3",
    "a: b",
    "#x",
    "x #y",
    "",
    " lead",
    "it's",
    "~",
)


@dataclass
class Leaf:
    """A scalar with its quoting and line comment."""

    value: str
    style: str = ""
    comment: str = ""

    def text(self) -> str:
        if self.style == "'":
            return "'" + self.value.replace("'", "''") + "'"
        if self.style == '"':
            return '"' + self.value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return self.value


NULL = Leaf("null")


@dataclass
class Doc:
    """One resource: a tree of dicts, lists and leaves; heads are comment lines above a top-level key."""

    tree: dict[str, object]
    heads: dict[str, str] = field(default_factory=dict)
    wide: bool = False
    mark: str = ""


@dataclass
class Case:
    """One package on three sides: path to text."""

    seed: int
    base: dict[str, str]
    local: dict[str, str]
    upstream: dict[str, str]


def leaf(rng: random.Random) -> Leaf:
    if rng.random() < 0.12:
        value = rng.choice(ODD)
        plain = (
            value
            and value not in ("~",)
            and ": " not in value
            and "#" not in value
            and value == value.strip()
        )
        style = rng.choice(["'", '"'] + ([""] if plain else []))
        return Leaf(value, style, comment(rng))
    style = rng.choice(["", "", "", "'", '"'])
    return Leaf(rng.choice(WORDS) + str(rng.randrange(4)), style, comment(rng))


def number(rng: random.Random) -> Leaf:
    return Leaf(str(rng.randrange(1, 6)), rng.choice(["", "", "", '"']), comment(rng))


def comment(rng: random.Random) -> str:
    return rng.choice(("note", "keep", "why")) + str(rng.randrange(3)) if rng.random() < 0.08 else ""


def container(rng: random.Random, name: str) -> dict[str, object]:
    made: dict[str, object] = {"name": Leaf(name), "image": Leaf(f"img:{rng.randrange(5)}")}
    if rng.random() < 0.6:
        made["env"] = [
            {"name": Leaf(n), "value": leaf(rng)} for n in rng.sample(("A", "B", "C"), rng.randrange(1, 4))
        ]
    if rng.random() < 0.5:
        made["args"] = [leaf(rng) for _ in range(rng.randrange(1, 3))]
    if rng.random() < 0.4:
        made["ports"] = [
            port(rng, "containerPort", n) for n in rng.sample((80, 443, 8080), rng.randrange(1, 3))
        ]
    if rng.random() < 0.4:
        made["volumeMounts"] = [
            {"name": Leaf("v"), "mountPath": Leaf(f"/m{n}")} for n in rng.sample((1, 2, 3), 2)
        ]
    if rng.random() < 0.4:
        made["resources"] = {"limits": {"cpu": leaf(rng), "memory": leaf(rng)}}
    return made


def port(rng: random.Random, key: str, value: int) -> dict[str, object]:
    made: dict[str, object] = {key: Leaf(str(value))}
    if rng.random() < 0.5:
        made["name"] = Leaf(f"p{value}")
    if rng.random() < 0.35:
        made["protocol"] = Leaf(rng.choice(("TCP", "UDP")))
    return made


def metadata(rng: random.Random, name: str) -> dict[str, object]:
    made: dict[str, object] = {"name": Leaf(name)}
    if rng.random() < 0.5:
        made["namespace"] = Leaf(rng.choice(("prod", "dev")))
    if rng.random() < 0.5:
        made["labels"] = {w: leaf(rng) for w in rng.sample(WORDS, 2)}
    if rng.random() < 0.3:
        made["annotations"] = {w: leaf(rng) for w in rng.sample(WORDS, 2)}
    if rng.random() < 0.2:
        made["finalizers"] = [Leaf(f"x/{w}") for w in rng.sample(WORDS, 2)]
    return made


def resource(rng: random.Random, name: str) -> Doc:
    kind = rng.choice(
        ("ConfigMap", "Deployment", "Deployment", "Service", "Widget", "CronJob", "Role", "Pod")
    )
    meta = metadata(rng, name)
    pod: dict[str, object] = {
        "containers": [container(rng, n) for n in rng.sample(("app", "side", "log"), rng.randrange(1, 3))]
    }
    if rng.random() < 0.4:
        pod["volumes"] = [
            {"name": Leaf(v), "emptyDir": {}} for v in rng.sample(("v", "w"), rng.randrange(1, 3))
        ]
    if rng.random() < 0.3:
        pod["tolerations"] = [{"key": leaf(rng), "effect": Leaf("NoSchedule")}]
    tree: dict[str, object]
    if kind == "ConfigMap":
        tree = {
            "apiVersion": Leaf("v1"),
            "kind": Leaf(kind),
            "metadata": meta,
            "data": {w: leaf(rng) for w in rng.sample(WORDS, 3)},
        }
    elif kind == "Deployment":
        labels = {"app": Leaf(name)}
        template = {"metadata": {"labels": {"app": Leaf(name)}}, "spec": pod}
        tree = {
            "apiVersion": Leaf("apps/v1"), "kind": Leaf(kind), "metadata": meta,
            "spec": {"replicas": number(rng), "selector": {"matchLabels": labels}, "template": template},
        }  # fmt: skip
    elif kind == "Service":
        ports = [port(rng, "port", n) for n in rng.sample((80, 443, 8080), rng.randrange(1, 3))]
        tree = {
            "apiVersion": Leaf("v1"),
            "kind": Leaf(kind),
            "metadata": meta,
            "spec": {"ports": ports, "type": leaf(rng)},
        }
    elif kind == "Widget":
        parts = [{"name": Leaf(w), "size": number(rng)} for w in rng.sample(WORDS, 2)]
        spec: dict[str, object] = {
            "parts": parts,
            "mode": leaf(rng),
            "deep": {"er": {"est": leaf(rng)}},
            "list": [leaf(rng)],
        }
        tree = {"apiVersion": Leaf("example.com/v1"), "kind": Leaf(kind), "metadata": meta, "spec": spec}
    elif kind == "CronJob":
        job = {"spec": {"template": {"spec": pod}}}
        tree = {
            "apiVersion": Leaf("batch/v1"),
            "kind": Leaf(kind),
            "metadata": meta,
            "spec": {"schedule": Leaf("* * * * *", '"'), "jobTemplate": job},
        }
    elif kind == "Role":
        rules = [{"apiGroups": [Leaf("", '"')], "resources": [leaf(rng), leaf(rng)], "verbs": [Leaf("get")]}]
        tree = {
            "apiVersion": Leaf("rbac.authorization.k8s.io/v1"),
            "kind": Leaf(kind),
            "metadata": meta,
            "rules": rules,
        }
    else:
        tree = {"apiVersion": Leaf("v1"), "kind": Leaf(kind), "metadata": meta, "spec": pod}
    doc = Doc(tree, wide=rng.random() < 0.3)
    if rng.random() < 0.15:
        doc.heads[rng.choice(list(tree)[1:])] = "# " + rng.choice(WORDS)
    return doc


# -- edits ---------------------------------------------------------------------------------------


def places(tree: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Every path below the tree except identity fields."""
    found: list[tuple[object, ...]] = []
    if isinstance(tree, dict):
        for key, value in tree.items():
            here = (*path, key)
            if here in (
                ("apiVersion",),
                ("kind",),
                ("metadata",),
                ("metadata", "name"),
                ("metadata", "namespace"),
            ):
                if here == ("metadata",):
                    found += places(value, here)
                continue
            found.append(here)
            found += places(value, here)
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            found.append((*path, index))
            found += places(value, (*path, index))
    return found


def at(tree: object, path: tuple[object, ...]) -> object:
    for step in path:
        tree = tree[step]  # type: ignore[index]
    return tree


def edit(rng: random.Random, doc: Doc) -> None:
    """One random change of a resource's fields."""
    options = places(doc.tree)
    if not options:
        return
    path = rng.choice(options)
    parent = at(doc.tree, path[:-1])
    value = at(doc.tree, path)
    step = path[-1]
    roll = rng.random()
    if roll < 0.2 and len(options) > 1:
        del parent[step]  # type: ignore[attr-defined]
    elif roll < 0.24 and isinstance(parent, dict):
        parent[step] = copy.deepcopy(NULL)
    elif isinstance(value, Leaf) and value == NULL:
        # A null may stand for a mapping: a scalar in its place would clash with the other side.
        del parent[step]  # type: ignore[attr-defined]
    elif isinstance(value, Leaf):
        if roll < 0.32:
            value.comment = comment(rng) or "remark"
        elif roll < 0.38 and value.style in ("'", '"'):
            value.style = "'" if value.style == '"' else '"'
        else:
            fresh = number(rng) if value.value.isdigit() else leaf(rng)
            if isinstance(parent, dict):
                parent[step] = fresh
            else:
                parent[step] = fresh  # type: ignore[index]
    elif isinstance(value, dict):
        # Names say whether they hold a mapping, so that the two sides never disagree on that.
        if rng.random() < 0.7:
            value[rng.choice(("zeta", "added", "aa", *WORDS))] = leaf(rng)
        else:
            value[rng.choice(("amap", "zmap"))] = {"x": leaf(rng), "b": leaf(rng)}
    elif isinstance(value, list):
        grow(rng, value, step)


def grow(rng: random.Random, items: list[object], step: object) -> None:
    """Change a list: add, drop, move or empty."""
    roll = rng.random()
    if roll < 0.2 and items:
        items.pop(rng.randrange(len(items)))
    elif roll < 0.35:
        rng.shuffle(items)
    elif step == "containers":
        have = {text(item, "name") for item in items}
        name = rng.choice(("app", "side", "log", "extra"))
        if name not in have:
            items.append(container(rng, name))
    elif step == "env":
        have = {text(item, "name") for item in items}
        name = rng.choice("ABCDE")
        if name not in have:
            items.append({"name": Leaf(name), "value": leaf(rng)})
    elif step == "ports":
        key = "containerPort" if any(text(item, "containerPort") for item in items) else "port"
        have = {text(item, key) for item in items}
        value = rng.choice((80, 443, 8080, 9090))
        if str(value) not in have:
            items.append(port(rng, key, value))
    elif step == "volumes":
        have = {text(item, "name") for item in items}
        if "x" not in have:
            items.append({"name": Leaf("x"), "emptyDir": {}})
    elif items and isinstance(items[0], Leaf):
        have = {item.value for item in items if isinstance(item, Leaf)}
        fresh = leaf(rng)
        if fresh.value not in have:
            items.append(fresh)
    elif items and isinstance(items[0], dict) and "size" in items[0]:
        items.append({"name": Leaf("fresh" + str(rng.randrange(3))), "size": number(rng)})


def text(item: object, key: str) -> str:
    found = item.get(key) if isinstance(item, dict) else None
    return found.value if isinstance(found, Leaf) else ""


Files = dict[str, list[Doc]]


def edit_files(rng: random.Random, files: Files, *, rename: bool) -> None:
    """One side's edits: mostly fields, some documents, rarely files."""
    for _ in range(rng.randrange(0, 6)):
        names = [name for name in files if files[name]]
        if not names:
            return
        name = rng.choice(names)
        docs = files[name]
        roll = rng.random()
        if roll < 0.66:
            edit(rng, rng.choice(docs))
        elif roll < 0.74 and sum(len(d) for d in files.values()) > 2:
            docs.pop(rng.randrange(len(docs)))
        elif roll < 0.84:
            docs.insert(rng.randrange(len(docs) + 1), resource(rng, f"new{rng.randrange(3)}-{len(docs)}"))
        elif roll < 0.91:
            rng.shuffle(docs)
        elif roll < 0.94:
            files.setdefault(f"more{rng.randrange(2)}.yaml", []).append(
                resource(rng, f"more{rng.randrange(9)}")
            )
        elif roll < 0.97:
            target = rng.choice(docs)
            heads = target.heads
            heads[rng.choice(list(target.tree)[1:])] = "# " + rng.choice(WORDS)
        elif rename:
            target = rng.choice(docs)
            meta = target.tree["metadata"]
            assert isinstance(meta, dict)
            if not target.mark and "name" in meta:
                space = meta.get("namespace")
                target.mark = f"{space.value if isinstance(space, Leaf) else ''}/{meta['name'].value}"
                meta["name"] = Leaf("renamed-" + meta["name"].value)
        else:
            target = rng.choice(docs)
            meta = target.tree["metadata"]
            assert isinstance(meta, dict)
            meta["name"] = Leaf(meta["name"].value + "-moved")
    _unique(files)


def _unique(files: Files) -> None:
    """Drop what would be the same resource twice in one file: kpt refuses that (an error case)."""
    for docs in files.values():
        seen: set[tuple[str, ...]] = set()
        for doc in list(docs):
            meta = doc.tree["metadata"]
            assert isinstance(meta, dict)
            space = meta.get("namespace")
            own = (space.value if isinstance(space, Leaf) else "", meta["name"].value)
            group = doc.tree["apiVersion"].value.rpartition("/")[0]  # type: ignore[attr-defined]
            key = (group, doc.tree["kind"].value, doc.mark or "/".join(own))  # type: ignore[attr-defined]
            if key in seen:
                docs.remove(doc)
            seen.add(key)


# -- text ----------------------------------------------------------------------------------------


def _value(value: object, indent: int, wide: bool) -> str:
    if isinstance(value, Leaf):
        return " " + value.text() + (f" # {value.comment}" if value.comment else "") + "\n"
    if isinstance(value, dict):
        return "\n" + _map(value, indent + 2, wide) if value else " {}\n"
    assert isinstance(value, list)
    return "\n" + _list(value, indent + 2 if wide else indent, wide) if value else " []\n"


def _map(tree: dict[str, object], indent: int, wide: bool) -> str:
    return "".join(" " * indent + key + ":" + _value(value, indent, wide) for key, value in tree.items())


def _list(items: list[object], indent: int, wide: bool) -> str:
    out = ""
    for item in items:
        if isinstance(item, dict) and item:
            out += " " * indent + "- " + _map(item, indent + 2, wide)[indent + 2 :]
        else:
            out += " " * indent + "-" + _value(item, indent, wide)
    return out


def render(doc: Doc) -> str:
    out = ""
    for key, value in doc.tree.items():
        if key in doc.heads:
            out += doc.heads[key] + "\n"
        body = _value(value, 0, doc.wide)
        if key == "metadata" and doc.mark:
            body = f" # kpt-merge: {doc.mark}" + body
        out += key + ":" + body
    return out


def texts(files: Files) -> dict[str, str]:
    return {name: "---\n".join(render(doc) for doc in docs) for name, docs in files.items() if docs}


KPTFILE = "apiVersion: kpt.dev/v1\nkind: Kptfile\nmetadata:\n  name: {name}\n"


def kptfile(rng: random.Random, name: str, state: dict[str, list[str]]) -> str:
    """A Kptfile; state is edited between sides so that they share most of it."""
    out = KPTFILE.format(name=name)
    if state["labels"]:
        out += "  labels:\n" + "".join(f"    {key}: v{rng.randrange(2)}\n" for key in state["labels"])
    out += f"info:\n  description: about {state['info'][0]}\n"
    if state["fns"]:
        out += "pipeline:\n  mutators:\n"
        for fn in state["fns"]:
            out += f"    - image: {fn}\n      configMap:\n        k: v{rng.randrange(2)}\n"
    return out


def _edit_state(rng: random.Random, state: dict[str, list[str]]) -> dict[str, list[str]]:
    state = copy.deepcopy(state)
    if rng.random() < 0.3:
        state["info"] = [rng.choice(WORDS)]
    if rng.random() < 0.3 and state["labels"]:
        state["labels"].pop()
    if rng.random() < 0.3:
        extra = rng.choice(WORDS)
        if extra not in state["labels"]:
            state["labels"].append(extra)
    if rng.random() < 0.3 and state["fns"]:
        fn = state["fns"][0].split(":")[0]
        state["fns"][0] = f"{fn}:v{rng.randrange(4)}"
    if rng.random() < 0.2 and state["fns"]:
        state["fns"].pop()
    if rng.random() < 0.2:
        state["fns"].append(f"example.com/fn{len(state['fns']) + rng.randrange(3, 9)}:v1")
    return state


def _plain_files(rng: random.Random, case: Case) -> None:
    """Files that are not KRM, edited independently."""
    for name in rng.sample(("README.md", "docs/notes.txt", "script.sh"), rng.randrange(0, 3)):
        first = f"line {rng.randrange(3)}\n"
        for side in (case.base, case.local, case.upstream):
            roll = rng.random()
            if side is case.base:
                if roll < 0.9:
                    side[name] = first
            elif roll < 0.55:
                if name in case.base:
                    side[name] = case.base[name]
            elif roll < 0.85:
                side[name] = f"edited {rng.randrange(2)}\n"


def case(seed: int, *, nested: bool | None = None) -> Case:
    """The case with this seed; nested decides on sub-packages where the seed should not."""
    rng = random.Random(seed)
    base: Files = {}
    for number_ in range(rng.randrange(1, 4)):
        docs = [resource(rng, f"r{number_}-{index}") for index in range(rng.choice((1, 1, 2, 3, 4)))]
        base[f"f{number_}.yaml" if number_ else "sub/f.yaml"] = docs
    local, upstream = copy.deepcopy(base), copy.deepcopy(base)
    edit_files(rng, local, rename=True)
    edit_files(rng, upstream, rename=False)
    made = Case(seed, texts(base), texts(local), texts(upstream))
    state = {
        "labels": rng.sample(WORDS, 2),
        "info": [rng.choice(WORDS)],
        "fns": ["example.com/fn1:v1", "example.com/fn2:v1"][: rng.randrange(3)],
    }
    name = f"c{seed:06d}"
    keep = rng.random() < 0.6
    values = rng.randrange(1 << 30)
    for side in (made.base, made.local, made.upstream):
        mine = state if side is made.base or keep else _edit_state(rng, state)
        side["Kptfile"] = kptfile(random.Random(values if rng.random() < 0.7 else rng.random()), name, mine)
    _plain_files(rng, made)
    if seed >= NESTED if nested is None else nested:
        for directory in ("inner", "inner/deep", "zone")[: rng.randrange(1, 4)]:
            _nested(rng, made, directory)
    return made


def _nested(rng: random.Random, made: Case, directory: str) -> None:
    """A sub-package: kept, edited, deleted or (by one side only: both is an error) added."""
    parent = directory.rpartition("/")[0]
    files: Files = {
        f"{directory}/n.yaml": [resource(rng, f"n{index}") for index in range(rng.randrange(1, 3))]
    }
    in_base = rng.random() < 0.8 and (not parent or f"{parent}/Kptfile" in made.base)
    added_by = rng.choice(("local", "upstream", "neither"))
    for name, side in (("base", made.base), ("local", made.local), ("upstream", made.upstream)):
        if parent and f"{parent}/Kptfile" not in side:
            continue
        mine = copy.deepcopy(files)
        if name != "base":
            if not in_base and name != added_by:
                continue
            roll = rng.random()
            if in_base and roll < 0.2:
                continue
            if roll < 0.7:
                edit(rng, rng.choice(mine[f"{directory}/n.yaml"]))
        elif not in_base:
            continue
        side.update(texts(mine))
        side[f"{directory}/Kptfile"] = KPTFILE.format(name=directory.rpartition("/")[2])
        side[f"{directory}/note.txt"] = "same\n" if rng.random() < 0.8 else f"by {name}\n"
