"""The functions of `import proximo`: what the command line does, from Python, on the same code."""
