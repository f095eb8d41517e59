"""What a reference becomes, decided before a byte of content is fetched where the format allows (V7, V16).

`make_plan` turns a manifest into a `Plan` of steps by the rules in `make`; one small module per format family
says what its layers are. `descend` and `select` choose within an index (V11), `merge_plans` puts several
references into one directory (V17), and `subset` is the grammar of `--only`. Called by `deliver` and by
`unlade plan`; imports only the model.
"""

from unlade.planning.errors import (
    NotATar,
    PathConflict,
    Unplaced,
    UnplacedLayers,
    about,
    nothing_produced,
)
from unlade.planning.make import make_plan, merge_plans
from unlade.planning.plan import (
    RULES_VERSION,
    FileRow,
    Plan,
    PlannedFile,
    PlanOptions,
    Source,
    Step,
)
from unlade.planning.select import Ambiguous, Chosen, IndexTooDeep, NoMatch, descend, select

__all__ = [
    "RULES_VERSION",
    "Ambiguous",
    "Chosen",
    "FileRow",
    "IndexTooDeep",
    "NoMatch",
    "NotATar",
    "PathConflict",
    "Plan",
    "PlanOptions",
    "PlannedFile",
    "Source",
    "Step",
    "Unplaced",
    "UnplacedLayers",
    "about",
    "descend",
    "make_plan",
    "merge_plans",
    "nothing_produced",
    "select",
]
