"""`proximo bench`: how fast this machine trains, compared with TRL and with its own limits."""

from proximo.bench.running import main


def run(arguments: list[str]) -> int:
    """Exit status: 0 done, 1 if a row is refused because numbers differ or memory ran out."""
    return main(arguments, prog="proximo bench")
