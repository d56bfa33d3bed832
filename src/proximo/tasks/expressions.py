"""Arithmetic on text that a model wrote: parsed, never executed."""

import ast
import operator
import re
from fractions import Fraction

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_LONGEST = 200


class NotAnExpression(Exception):
    """Raised where a text is not whole numbers joined by + - * / and parentheses, or divides by zero."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression, and the numbers it uses, in order."""
    # Only these characters reach the parser: no names, no strings, and none of the parser's warnings.
    if len(text) > _LONGEST or not re.fullmatch(r"[0-9 ()+*/-]+", text):
        raise NotAnExpression(text)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        numbers: list[int] = []
        return _value(tree, numbers), numbers
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        raise NotAnExpression(text) from None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            numbers.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, numbers)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            first = _value(left, numbers)
            return _OPERATORS[type(op)](first, _value(right, numbers))
        case _:
            raise NotAnExpression(ast.dump(node))
