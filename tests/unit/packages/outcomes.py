"""The outcome table: what a merge does with each combination of base, local and upstream.

Each line has the number under which kpt's behaviour is known (docs/kpt-differences.md names those that
differ on purpose). The same table is run against the merge here and against the real kpt by the interop
tests, so an expectation that is wrong about kpt fails there.
"""

from dataclasses import dataclass

Files = dict[str, str]

WIDGET = "apiVersion: example.com/v1\nkind: Widget\nmetadata:\n  name: w\n"
DEPLOY = "apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: d\n"
SERVICE = "apiVersion: v1\nkind: Service\nmetadata:\n  name: s\n"
KPT = "apiVersion: kpt.dev/v1\nkind: Kptfile\nmetadata:\n  name: sub\n"
FN = "pipeline:\n  mutators:\n"
KEEP = {"keep.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: keep\ndata: {k: v}\n"}


@dataclass(frozen=True)
class Line:
    """One line: three sides and the outcome. A missing outcome file must be absent."""

    number: str
    base: Files
    local: Files
    upstream: Files
    outcome: Files
    # What kpt does instead, where ours differs on purpose; None: the same.
    kpt: Files | None = None
    # Substring of our error instead of an outcome; kpt fails as well.
    error: str = ""
    # Comments and quoting count, too.
    exact: bool = False


def one(
    number: str,
    base: str,
    local: str,
    upstream: str,
    outcome: str,
    *,
    head: str = WIDGET,
    kpt: str | None = None,
    error: str = "",
    exact: bool = False,
) -> Line:
    """A line about the fields of one resource."""

    def file(body: str) -> Files:
        return {**KEEP, "a.yaml": head + body}

    instead = file(kpt) if kpt is not None else None
    return Line(
        number, file(base), file(local), file(upstream), file(outcome), kpt=instead, error=error, exact=exact
    )


def pod(containers: str) -> str:
    """A deployment's spec with these container lines."""
    return "spec:\n  template:\n    spec:\n      containers:\n" + containers


def files(
    number: str,
    base: Files,
    local: Files,
    upstream: Files,
    outcome: Files,
    *,
    kpt: Files | None = None,
    error: str = "",
) -> Line:
    """A line about whole files, beside one resource that never changes."""
    instead = {**KEEP, **kpt} if kpt is not None else None
    first, mine, theirs, after = ({**KEEP, **side} for side in (base, local, upstream, outcome))
    return Line(number, first, mine, theirs, after, kpt=instead, error=error)


def cm(name: str, value: str, extra: str = "") -> str:
    """A config map with one value."""
    return f"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\ndata:\n  k: {value}\n{extra}"


VOLUMES = "spec:\n  template:\n    spec:\n      volumes:\n      - name: v\n"
C1 = "      - name: c\n        image: i:1\n        env:\n        - name: A\n          value: a1\n"
C1L = C1.replace("i:1", "i:L")
C1U = C1.replace("i:1", "i:U")
D = "      - name: d\n        image: d:1\n"

LINES: list[Line] = [
    one("1", "spec:\n  a: 0\n", "spec:\n  a: L\n", "spec:\n  a: 0\n", "spec:\n  a: L\n"),
    one("2", "spec:\n  a: 0\n", "spec:\n  a: 0\n", "spec:\n  a: U\n", "spec:\n  a: U\n"),
    one("3", "spec:\n  a: 0\n", "spec:\n  a: L\n", "spec:\n  a: U\n", "spec:\n  a: U\n"),
    one(
        "4",
        "spec:\n  x: 1\n",
        "spec:\n  x: 1\n  a: L\n",
        "spec:\n  x: 1\n  a: U\n",
        "spec:\n  x: 1\n  a: U\n",
    ),
    one("5a", "spec:\n  x: 1\n", "spec:\n  x: 1\n  a: L\n", "spec:\n  x: 1\n", "spec:\n  x: 1\n  a: L\n"),
    one("5b", "spec:\n  x: 1\n", "spec:\n  x: 1\n", "spec:\n  x: 1\n  a: U\n", "spec:\n  x: 1\n  a: U\n"),
    one("6", "spec:\n  x: 1\n  a: 0\n", "spec:\n  x: 1\n", "spec:\n  x: 1\n  a: 0\n", "spec:\n  x: 1\n"),
    one(
        "7",
        "spec:\n  x: 1\n  a: 0\n",
        "spec:\n  x: 1\n",
        "spec:\n  x: 1\n  a: U\n",
        "spec:\n  x: 1\n  a: U\n",
    ),
    one("8", "spec:\n  x: 1\n  a: 0\n", "spec:\n  x: 1\n  a: L\n", "spec:\n  x: 1\n", "spec:\n  x: 1\n"),
    one(
        "9a",
        "spec:\n  x: 1\n  a: 0\n",
        "spec:\n  x: 1\n  a: null\n",
        "spec:\n  x: 1\n  a: 0\n",
        "spec:\n  x: 1\n",
    ),
    one(
        "9b",
        "spec:\n  x: 1\n  a: 0\n",
        "spec:\n  x: 1\n  a: 0\n",
        "spec:\n  x: 1\n  a: null\n",
        "spec:\n  x: 1\n",
    ),
    one(
        "9c",
        "spec:\n  x: 1\n  a: null\n",
        "spec:\n  x: 1\n  a: null\n",
        "spec:\n  x: 1\n  a: null\n",
        "spec:\n  x: 1\n",
    ),
    one("9d", "spec:\n  x: 1\n  a:\n", "spec:\n  x: 1\n  a:\n", "spec:\n  x: 1\n  a:\n", "spec:\n  x: 1\n"),
    one("10", "spec:\n  a: 1\n", "spec:\n  a: 1\n", 'spec:\n  a: "1"\n', "spec:\n  a: 1\n", exact=True),
    one(
        "11a", "spec:\n  a: 'x'\n", "spec:\n  a: 'x'\n", 'spec:\n  a: "x"\n', "spec:\n  a: 'x'\n", exact=True
    ),
    one(
        "11b", "spec:\n  a: 'x'\n", "spec:\n  a: 'x'\n", 'spec:\n  a: "y"\n', "spec:\n  a: 'y'\n", exact=True
    ),
    one(
        "12a",
        "spec:\n  a: 1 # o\n",
        "spec:\n  a: 1 # o\n",
        "spec:\n  a: 1 # u\n",
        "spec:\n  a: 1 # u\n",
        exact=True,
    ),
    one(
        "12b",
        "spec:\n  a: 1 # o\n",
        "spec:\n  a: L # o\n",
        "spec:\n  a: 1 # u\n",
        "spec:\n  a: L # o\n",
        exact=True,
    ),
    one(
        "12c",
        "spec:\n  a: 1 # o\n",
        "spec:\n  a: 1 # l\n",
        "spec:\n  a: 1 # u\n",
        "spec:\n  a: 1 # l\n",
        exact=True,
    ),
    one(
        "13",
        "spec:\n  a: 1 # o\n",
        "spec:\n  a: 1 # l\n",
        "spec:\n  a: U # u\n",
        "spec:\n  a: U # u\n",
        exact=True,
    ),
    one(
        "14",
        "spec:\n  x: 1\n  m:\n    a: 0\n    b: 0\n",
        "spec:\n  x: 1\n  m:\n    a: L\n    b: 0\n    c: L\n",
        "spec:\n  x: 1\n",
        "spec:\n  x: 1\n  m:\n    c: L\n",
    ),
    one(
        "14b",
        "spec:\n  x: 1\n  m:\n    a: 0\n",
        "spec:\n  x: 1\n  m:\n    a: 0\n",
        "spec:\n  x: 1\n",
        "spec:\n  x: 1\n  m: {}\n",
    ),
    one(
        "15",
        "spec:\n  x: 1\n  m:\n    a: 0\n",
        "spec:\n  x: 1\n",
        "spec:\n  x: 1\n  m:\n    a: 0\n",
        "spec:\n  x: 1\n  m: {}\n",
    ),
    one(
        "16",
        "spec:\n  x: 1\n  m:\n    a: 0\n    b: 0\n",
        "spec:\n  x: 1\n",
        "spec:\n  x: 1\n  m:\n    a: 0\n    b: U\n",
        "spec:\n  x: 1\n  m:\n    b: U\n",
    ),
    one(
        "17",
        "spec:\n  m:\n    a: 0\n",
        "spec:\n  m: text\n",
        "spec:\n  m:\n    a: 1\n",
        "",
        error="a scalar on one side",
    ),
    one(
        "18",
        "spec:\n  z: 1\n  a: 1\n",
        "spec:\n  z: 1\n  a: 1\n",
        "spec:\n  z: 1\n  n: U\n  a: 1\n  b: U\n",
        "spec:\n  z: 1\n  a: 1\n  b: U\n  n: U\n",
        exact=True,
    ),
    one(
        "19",
        "spec:\n  x: &A 1\n  y: *A\n",
        "spec:\n  x: &A 1\n  y: *A\n",
        "spec:\n  x: &A 1\n  y: *A\n  n: U\n",
        "spec:\n  x: &A 1\n  y: *A\n  n: U\n",
        kpt="spec:\n  x: &A 1\n  n: U\n",
    ),
    one("20", "spec:\n  a: x\n", "spec:\n  a: x\n", "spec:\n  a: 'yes'\n", 'spec:\n  a: "yes"\n', exact=True),
    one(
        "21a",
        "spec:\n  l:\n  - a\n  - b\n",
        "spec:\n  l:\n  - a\n  - b\n  - L\n",
        "spec:\n  l:\n  - a\n  - U\n",
        "spec:\n  l:\n  - a\n  - U\n",
    ),
    one(
        "21b",
        "spec:\n  l:\n  - a\n",
        "spec:\n  l:\n  - a\n  - L\n",
        "spec:\n  l:\n  - a\n",
        "spec:\n  l:\n  - a\n  - L\n",
    ),
    one(
        "21c",
        "spec:\n  l:\n  - name: a\n    v: 0\n",
        "spec:\n  l:\n  - name: a\n    v: L\n",
        "spec:\n  l:\n  - name: a\n    v: 0\n  - name: b\n",
        "spec:\n  l:\n  - name: a\n    v: 0\n  - name: b\n",
    ),
    one("22a", pod(C1), pod(C1L), pod(C1), pod(C1L), head=DEPLOY),
    one("22b", pod(C1), pod(C1L), pod(C1U), pod(C1U), head=DEPLOY),
    one(
        "23",
        pod(C1),
        pod(C1),
        pod(C1 + D),
        pod(C1 + "      - image: d:1\n        name: d\n"),
        head=DEPLOY,
        exact=True,
    ),
    one("24", pod(C1 + D), pod(C1 + D.replace("d:1", "d:L")), pod(C1), pod(C1), head=DEPLOY),
    one("25", pod(C1 + D), pod(C1), pod(C1 + D), pod(C1), head=DEPLOY),
    one(
        "26",
        pod(C1 + D + "        tty: true\n"),
        pod(C1),
        pod(C1 + D.replace("d:1", "d:U") + "        tty: true\n"),
        pod(C1 + "      - image: d:U\n        name: d\n"),
        head=DEPLOY,
    ),
    one("27", pod(C1 + D), pod(C1 + D), pod(D + C1), pod(C1 + D), head=DEPLOY, exact=True),
    one(
        "28",
        pod(C1 + D),
        pod(C1 + D + "      - name: mine\n"),
        "spec:\n  template:\n    spec:\n      x: 1\n",
        "spec:\n  template:\n    spec:\n      x: 1\n",
        head=DEPLOY,
    ),
    one(
        "29",
        pod(D),
        "spec:\n  template:\n    spec: {}\n",
        pod(D),
        "spec:\n  template:\n    spec:\n      containers: []\n",
        head=DEPLOY,
    ),
    one(
        "30",
        VOLUMES + "        emptyDir: {}\n",
        VOLUMES + "        emptyDir: {}\n",
        VOLUMES + "        configMap:\n          name: c\n",
        VOLUMES + "        emptyDir: {}\n        configMap:\n          name: c\n",
        head=DEPLOY,
    ),
    one(
        "31a",
        "spec:\n  ports:\n  - port: 80\n",
        "spec:\n  ports:\n  - port: 80\n",
        "spec:\n  ports:\n  - port: 80\n    protocol: TCP\n",
        "spec:\n  ports:\n  - port: 80\n  - port: 80\n    protocol: TCP\n",
        head=SERVICE,
    ),
    one(
        "31b",
        "spec:\n  ports:\n  - port: 80\n    name: a\n",
        "spec:\n  ports:\n  - port: 80\n    name: a\n    protocol: TCP\n",
        "spec:\n  ports:\n  - port: 80\n    name: U\n",
        "spec:\n  ports:\n  - port: 80\n    name: a\n    protocol: TCP\n",
        head=SERVICE,
    ),
    one(
        "32",
        "  finalizers:\n  - a\n",
        "  finalizers:\n  - a\n  - l\n",
        "  finalizers:\n  - a\n  - u\n",
        "  finalizers:\n  - a\n  - l\n  - u\n",
        head="apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: f\n",
    ),
    files("33a", {"a.yaml": cm("a", "1")}, {"a.yaml": cm("a", "1")}, {}, {}),
    files(
        "33b", {"a.yaml": cm("a", "1")}, {"a.yaml": cm("a", "1 # mine")}, {}, {"a.yaml": cm("a", "1 # mine")}
    ),
    files("33c", {"a.yaml": cm("a", "1")}, {"a.yaml": cm("a", "'1'")}, {}, {"a.yaml": cm("a", "'1'")}),
    files("33d", {"a.yaml": cm("a", "1")}, {"a.yaml": cm("a", "1").replace("\ndata:", "\n\ndata:")}, {}, {}),
    files("35", {"a.yaml": cm("a", "1")}, {}, {"a.yaml": cm("a", "U")}, {}),
    files(
        "36",
        {},
        {"a.yaml": cm("a", "L", "  l: 1\n")},
        {"a.yaml": cm("a", "U", "  u: 1\n")},
        {"a.yaml": cm("a", "U", "  l: 1\n  u: 1\n")},
    ),
    files(
        "37a",
        {"a.yaml": cm("a", "1")},
        {"a.yaml": cm("b", "1").replace("metadata:", "metadata: # kpt-merge: /a")},
        {"a.yaml": cm("a", "U")},
        {"a.yaml": cm("b", "U").replace("metadata:", "metadata: # kpt-merge: /a")},
    ),
    files(
        "37b",
        {"a.yaml": cm("a", "1")},
        {"a.yaml": cm("b", "1")},
        {"a.yaml": cm("a", "U")},
        {"a.yaml": cm("b", "1")},
    ),
    files(
        "38a",
        {"a.yaml": cm("a", "1")},
        {"a.yaml": cm("a", "1")},
        {"a.yaml": cm("b", "1")},
        {"a.yaml": cm("b", "1")},
    ),
    files(
        "38b",
        {"a.yaml": cm("a", "1")},
        {"a.yaml": cm("a", "L")},
        {"a.yaml": cm("b", "1")},
        {"a.yaml": cm("a", "L") + "---\n" + cm("b", "1")},
    ),
    files(
        "39a",
        {"a.yaml": cm("a", "1")},
        {"z.yaml": cm("a", "1")},
        {"a.yaml": cm("a", "U")},
        {"z.yaml": cm("a", "1")},
    ),
    files(
        "39b",
        {"a.yaml": cm("a", "1")},
        {"a.yaml": cm("a", "L")},
        {"z.yaml": cm("a", "1")},
        {"a.yaml": cm("a", "L"), "z.yaml": cm("a", "1")},
    ),
    files(
        "40a",
        {"a.yaml": cm("a", "1")},
        {"a.yaml": cm("a", "1") + "---\n" + cm("a", "2")},
        {"a.yaml": cm("a", "U")},
        {},
        error="twice",
    ),
    files(
        "40b",
        {"a.yaml": cm("a", "1")},
        {"a.yaml": cm("a", "1")},
        {"a.yaml": cm("a", "U") + "---\n" + cm("a", "2")},
        {},
        error="twice",
    ),
    files(
        "41",
        {"a.yaml": cm("a", "1")},
        {"a.yaml": cm("a", "L").replace("metadata:", "metadata: # kpt-merge: broken")},
        {"a.yaml": cm("a", "U")},
        {},
        error="NAMESPACE/NAME",
    ),
    files(
        "42a",
        {"a.yaml": cm("a", "1") + "---\n" + cm("b", "1")},
        {"a.yaml": cm("b", "1") + "---\n" + cm("a", "1")},
        {"a.yaml": cm("a", "U") + "---\n" + cm("b", "1")},
        {"a.yaml": cm("b", "1") + "---\n" + cm("a", "U")},
    ),
    files(
        "42b",
        {"a.yaml": cm("a", "1") + "---\n" + cm("b", "1")},
        {"a.yaml": cm("a", "1") + "---\n" + cm("b", "1")},
        {"a.yaml": cm("b", "1") + "---\n" + cm("a", "1")},
        {"a.yaml": cm("b", "1") + "---\n" + cm("a", "1")},
    ),
    files(
        "43",
        {"a.yaml": "# old\n"},
        {"a.yaml": "# mine\n"},
        {"a.yaml": "# new\n", "b.yaml": "# added\n"},
        {"a.yaml": "# mine\n"},
    ),
    files("44a", {"t.txt": "0"}, {"t.txt": "L"}, {"t.txt": "U"}, {"t.txt": "L"}),
    files("44b", {"t.txt": "0"}, {"t.txt": "0"}, {"t.txt": "U"}, {"t.txt": "U"}),
    files("44c", {"t.txt": "0"}, {"t.txt": "0"}, {}, {}),
    files("44d", {"t.txt": "0"}, {"t.txt": "L"}, {}, {"t.txt": "L"}),
    files("44e", {"t.txt": "0"}, {}, {"t.txt": "0"}, {"t.txt": "0"}),
    files("45", {".gitignore": "0"}, {".gitignore": "0"}, {".gitignore": "U"}, {".gitignore": "0"}),
    files(
        "46",
        {"a.yaml": cm("a", "1")},
        {"a.yaml": cm("a", "1")},
        {"a.yaml": "a: [1\n"},
        {},
        error="not valid YAML",
    ),
    files(
        "47a",
        {"Kptfile": KPT + "pipeline:\n  mutators:\n  - image: a:v1\n"},
        {"Kptfile": KPT + "pipeline:\n  mutators:\n  - image: a:v1\n    configMap:\n      k: L\n"},
        {"Kptfile": KPT + "pipeline:\n  mutators:\n  - image: a:v2\n  - image: b:v1\n"},
        {
            "Kptfile": KPT
            + "pipeline:\n  mutators:\n  - image: a:v2\n    configMap:\n      k: L\n  - image: b:v1\n"
        },
    ),
    files(
        "47b",
        {"Kptfile": KPT + "pipeline:\n  mutators:\n  - image: a:v1\n    name: n\n"},
        {
            "Kptfile": KPT
            + "pipeline:\n  mutators:\n  - image: a:v1\n    name: n\n    configMap:\n      k: L\n"
        },
        {"Kptfile": KPT + "pipeline:\n  mutators:\n  - image: z:v2\n    name: n\n"},
        {
            "Kptfile": KPT
            + "pipeline:\n  mutators:\n  - image: z:v2\n    name: n\n    configMap:\n      k: L\n"
        },
    ),
    files(
        "47c",
        {"Kptfile": KPT + "pipeline:\n  mutators:\n  - image: a:v1\n  - image: a:v1\n"},
        {"Kptfile": KPT + "pipeline:\n  mutators:\n  - image: a:L\n  - image: a:v1\n"},
        {"Kptfile": KPT + "pipeline:\n  mutators:\n  - image: a:v1\n  - image: a:U\n"},
        {"Kptfile": KPT + "pipeline:\n  mutators:\n  - image: a:v1\n  - image: a:U\n"},
    ),
    files(
        "47d",
        {"Kptfile": KPT + FN + "  - image: a:v1\n    name: n\n"},
        {"Kptfile": KPT + FN + "  - image: a:v1\n    name: n\n  - image: x:v1\n"},
        {"Kptfile": KPT + FN + "  - image: a:v2\n    name: n\n"},
        {"Kptfile": KPT + FN + "  - image: x:v1\n  - image: a:v2\n    name: n\n"},
    ),
    files(
        "47e",
        {"Kptfile": KPT + FN + "  - image: a:v1\n    name: n\n"},
        {"Kptfile": KPT + FN + "  - image: a:v1\n    name: n\n"},
        {"Kptfile": KPT + FN + "  - image: a:v2\n    name: n\n  - image: x:v1\n"},
        {},
        error="elements had names",
    ),
    files(
        "47f",
        {"Kptfile": KPT + FN + "  - image: x:v1\n"},
        {"Kptfile": KPT + FN + "  - image: x:v1\n"},
        {"Kptfile": KPT + FN + "  - image: x:v1\n    name: q\n"},
        {"Kptfile": KPT + FN + "  - image: x:v1\n  - image: x:v1\n    name: q\n"},
    ),
    files(
        "48",
        {"Kptfile": KPT + "pipeline:\n  mutators:\n  - image: a:v1\n  - image: b:v1\n"},
        {"Kptfile": KPT + "pipeline:\n  mutators:\n  - image: a:L\n  - image: b:v1\n"},
        {"Kptfile": KPT + "pipeline:\n  mutators:\n  - image: b:v1\n"},
        {"Kptfile": KPT + "pipeline:\n  mutators:\n  - image: b:v1\n"},
    ),
    files(
        "48b",
        {"Kptfile": KPT + "info:\n  description: a\n"},
        {"Kptfile": KPT + "info:\n  description: L\n"},
        {"Kptfile": KPT + "info:\n  description: U\n  site: s\n"},
        {"Kptfile": KPT + "info:\n  description: U\n  site: s\n"},
    ),
    files(
        "49a",
        {},
        {},
        {"n/Kptfile": KPT, "n/a.yaml": cm("a", "1")},
        {"n/Kptfile": KPT, "n/a.yaml": cm("a", "1")},
    ),
    files("49b", {}, {"n/Kptfile": KPT}, {"n/Kptfile": KPT}, {}, error="added both locally and upstream"),
    files(
        "49c",
        {"n/Kptfile": KPT, "n/a.yaml": cm("a", "1")},
        {},
        {"n/Kptfile": KPT, "n/a.yaml": cm("a", "U")},
        {},
    ),
    files(
        "49d",
        {"n/Kptfile": KPT, "n/a.yaml": cm("a", "1")},
        {"n/Kptfile": KPT, "n/a.yaml": cm("a", "1")},
        {},
        {},
    ),
    files(
        "49e",
        {"n/Kptfile": KPT, "n/a.yaml": cm("a", "1")},
        {"n/Kptfile": KPT, "n/a.yaml": cm("a", "L")},
        {},
        {"n/Kptfile": KPT, "n/a.yaml": cm("a", "L")},
    ),
    files(
        "50",
        {"n/a.yaml": cm("a", "1")},
        {"n/a.yaml": cm("a", "1")},
        {"n/Kptfile": KPT, "n/a.yaml": cm("a", "U")},
        {"n/Kptfile": KPT, "n/a.yaml": cm("a", "U")},
        kpt={},
    ),
    files(
        "51",
        {"db/Kptfile": KPT, "db/a.yaml": cm("a", "1"), "db.yaml": cm("x", "1"), "dba/b.yaml": cm("y", "1")},
        {"db/Kptfile": KPT, "db/a.yaml": cm("a", "1"), "db.yaml": cm("x", "1"), "dba/b.yaml": cm("y", "1")},
        {"db/Kptfile": KPT, "db/a.yaml": cm("a", "1"), "db.yaml": cm("x", "U"), "dba/b.yaml": cm("y", "U")},
        {"db/Kptfile": KPT, "db/a.yaml": cm("a", "1"), "db.yaml": cm("x", "U"), "dba/b.yaml": cm("y", "U")},
        kpt={
            "db/Kptfile": KPT,
            "db/a.yaml": cm("a", "1"),
            "db.yaml": cm("x", "1"),
            "dba/b.yaml": cm("y", "1"),
        },
    ),
]
# 34: the last resource of a package deleted upstream; kpt then writes nothing at all and keeps it.
LAST = Line(
    "34",
    {"a.yaml": cm("a", "1")},
    {"a.yaml": cm("a", "1")},
    {"n.txt": "n"},
    {"n.txt": "n"},
    kpt={"a.yaml": cm("a", "1"), "n.txt": "n"},
)
