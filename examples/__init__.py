"""Programs to run under torchrun; each says how in its first lines."""
