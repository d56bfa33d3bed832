"""`proximo bench`: how fast this machine trains, beside TRL and beside its own limits."""

from proximo.bench.running import main


def run(arguments: list[str]) -> int:
    """0 done, 1 where a row is refused: numbers differ, or memory ran out."""
    return main(arguments, prog="proximo bench")
