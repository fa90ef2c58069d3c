"""Plans of Hybrid HiSparse: which rows are on the GPU, which in host memory, what moves between. Integers only."""

from .copies import CopyDone, CopyKind, CopyPlan, PageRun
from .plan import Admitted, Counters, HotRegion, Places, ResidencyPlan, TableUpdate
from .residency import Residency
from .sizes import ResidencySizes
from .states import PageEvent, PageState

__all__ = [
    "Admitted",
    "CopyDone",
    "CopyKind",
    "CopyPlan",
    "Counters",
    "HotRegion",
    "PageEvent",
    "PageRun",
    "PageState",
    "Places",
    "Residency",
    "ResidencyPlan",
    "ResidencySizes",
    "TableUpdate",
]
