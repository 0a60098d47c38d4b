"""What a head computes: its operators on a batch of records, recorded from one run on tensors that have no values.

The run goes through torch's dispatcher below every Python layer, so subclasses, functional calls, parametrisations and
in-place operators are all seen as the operators that really execute. Operators on weights alone run for real, so
effective weights come out; operators that touch the input run on shapes only. A head that tries to read a value of its
input, draws randomness or writes to its own weights is refused before that happens, so a recording leaves the head as
it was.
"""

from __future__ import annotations

import torch

from sensitivity.capturing.recorder import Recorder
from sensitivity.capturing.recording import Recording
from sensitivity.capturing.surroundings import Surroundings
from sensitivity.capturing.symbolic import AnyBatchSize, any_batch_size

BATCH_SIZE = 13  # no ordinary layer has 13 channels by accident; other sizes are compared by `batching`
SECOND_BATCH_SIZE = 31  # recorded beside the first where the batch size is unknown: what differs came from it


def record(
    head: torch.nn.Module,
    *,
    input_shape: tuple[int, ...],
    dtype: torch.dtype,
    batch_size: int | None = BATCH_SIZE,
    scattered: bool = False,
) -> Recording:
    """Record the operators that a head applies to a batch.

    Args:
        head: the module, in the mode in which it will release.
        input_shape: shape of one record, batch dimension excluded.
        dtype: element type of the input.
        batch_size: records in the batch; None for an unknown number from 2 on, on which nothing may depend.
        scattered: let no tensor be contiguous unless an operator makes it so; else all are.

    Returns:
        The recording; where the batch size is unknown, that of BATCH_SIZE records.

    Raises:
        UnsupportedModuleError: if the head reads values of its input, draws random numbers, writes to its weights,
            buffers or attributes, updates a view in place and reads the rest, uses an unknown batch size other than as
            the first size of a view, or returns anything but one tensor that depends on its input.
        ValueError: if the head does not run on this shape.

    Guarantee: values of the recorded run that depend on the input do so through the recorded operators alone. The
        head's attributes, its gradients and the random states of torch, Python and NumPy stay as they were.
    """
    if batch_size is None:
        with any_batch_size(hint=BATCH_SIZE) as symbol:
            return _record(head, input_shape, dtype, (BATCH_SIZE, SECOND_BATCH_SIZE), symbol=symbol)
    return _record(head, input_shape, dtype, (batch_size,), scattered=scattered)


def _record(
    head: torch.nn.Module,
    input_shape: tuple[int, ...],
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    *,
    symbol: AnyBatchSize | None = None,
    scattered: bool = False,
) -> Recording:
    recorder = Recorder(head, sizes=sizes, symbol=symbol, scattered=scattered)
    around = Surroundings(head)
    try:
        output = recorder.run(input_shape, dtype)
    finally:
        changed, drawn = around.restore_attributes(), around.restore_random_states()
    if drawn:
        recorder.refuse(
            "draws random numbers (from Python or NumPy)",
            "a random head has no fixed sensitivity",
            "remove it, or draw once before certifying",
        )
    if changed:
        recorder.refuse(
            f"changes itself in forward (attribute {changed[0]!r})",
            "the next release would come from another head",
            "keep state, activations included, out of forward",
        )
    return Recording(nodes=tuple(recorder.nodes), output=output.node, batch_size=sizes[0])
