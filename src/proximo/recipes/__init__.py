"""Settings that are known to work: presets, defaults, chains of stages, and checks of a set-up."""
