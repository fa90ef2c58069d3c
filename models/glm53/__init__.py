"""GLM-5.3 (``GlmMoeDsaForCausalLM``) over the primitives of ``cptools``."""

from .config import GLM53Config
from .model import GLM53
from .step import EngineCache, StepResult

__all__ = ["GLM53", "EngineCache", "GLM53Config", "StepResult"]
