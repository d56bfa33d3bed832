"""Configs: frozen values to TOML and back, and the classes that they name."""
