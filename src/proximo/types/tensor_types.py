"""Shapes in signatures: `Float[Tensor, "B T"]`.

Checked in tests only, by jaxtyping's import hook. jaxtyping is a development tool, so without it
the annotations fall back to plain tensors and `import proximo` still needs torch alone.

Letters: P problems, G rollouts in a group, B rows, T positions, V vocabulary, N pairs.
Of a mixture of experts: L layers, X experts, K of them for a token.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:

        class _Unchecked:
            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]

        Bool = Float = Int = _Unchecked

__all__ = ["Bool", "Float", "Int"]
