"""A calculator as a tool."""

from proximo.tasks.expressions import NotAnExpression, evaluate


def calculate(expression: str) -> str:
    """Calculate an expression of whole numbers, such as 12*(3+4).

    Args:
        expression: whole numbers with + - * / and brackets
    """
    try:
        return str(evaluate(expression)[0])
    except NotAnExpression:
        raise ValueError("give whole numbers with + - * / and brackets, and divide by no 0") from None
