"""Models built from the public API of ``cptools``."""
