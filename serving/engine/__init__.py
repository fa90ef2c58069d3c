"""One engine: a model, its cache and the requests on them, step after step."""

from .answers import TokenLogprob
from .model_runner import ModelRunner
from .paged_model import PagedCache, PagedModel
from .tickets import StepTicket

__all__ = ["ModelRunner", "PagedCache", "PagedModel", "StepTicket", "TokenLogprob"]
