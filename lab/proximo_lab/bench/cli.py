"""`proximo bench`."""

from proximo_lab.bench.running import main


def run(arguments: list[str]) -> int:
    """Run a benchmark; returns what `main` returns."""
    return main(arguments, prog="proximo bench")
