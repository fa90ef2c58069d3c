"""One engine: a model, its cache and the requests on them, step after step."""

from .model_runner import ModelRunner, PagedModel
from .tickets import StepTicket

__all__ = ["ModelRunner", "PagedModel", "StepTicket"]
