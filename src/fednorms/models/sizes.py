"""Check the size of images for models with a fixed input size."""

from __future__ import annotations

from collections.abc import Sequence

from fednorms.core.errors import BadInput


def require_size(model: str, got: int | Sequence[int], expected: int) -> None:
    """Refuse images of a size that a model cannot take.

    >>> require_size("lenet", 32, 32)
    >>> require_size("lenet", (28, 28), 32)
    Traceback (most recent call last):
    fednorms.BadInput: Model "lenet" takes 32x32 images, got 28x28. Resize the images to 32 or choose
    ...
    """
    height, width = (got, got) if isinstance(got, int) else got
    if (height, width) != (expected, expected):
        raise BadInput(
            f'Model "{model}" takes {expected}x{expected} images, got {height}x{width}. Resize the images to '
            f'{expected} or choose a model that takes any size, such as "cnn-small".'
        )
