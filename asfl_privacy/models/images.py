"""Which records the built-in networks take."""

from __future__ import annotations


def check_image(input_shape: tuple[int, ...], *, least: int, network: str) -> tuple[int, int, int]:
    """The shape of a record that is an image large enough for a network.

    Args:
        input_shape: Of one record.
        least: Smallest height and width that the network takes, in pixels.
        network: Its name, for the message.

    Returns:
        (channels, height, width).

    Raises:
        ValueError: A record that is no image, or too small a one.

    Example:
        >>> check_image((3, 32, 32), least=4, network="lenet")
        (3, 32, 32)
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise ValueError(
            f"records of shape {input_shape} do not fit the built-in network {network}, which takes (channels, height, width) "
            f"from {least}×{least} on; use another network, or your own as module:factory"
        )
    return input_shape[0], input_shape[1], input_shape[2]
