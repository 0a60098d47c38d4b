"""A decoder: a network that learns, on records of the attacker's own, to undo the release, noise included."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss

from asfl_privacy.accounting.checks import check_box, check_integer, check_real
from asfl_privacy.attacks.guards import check_batch, check_rows

CHECKS = 20
"""How often the decoder is tried on the auxiliary records that it does not learn from."""
BLOCK = 1024
"""Records released at a time."""


class Decoder(nn.Module):
    """Mean record plus what two paths read from the activations: a multilayer one, and a convolutional one for maps.

    Both paths end in zero weights, so that an untrained decoder gives the mean record.

    Args:
        released: activations of auxiliary records, shape (batch, ...); their mean and spread scale the input.
        inputs: those records, shape (batch, *input_shape).
        input_box: (low, high) of the records.
        width: hidden units of the multilayer path; the convolutional one has an eighth as many channels.
    """

    centre: Tensor
    spread: Tensor
    mean_record: Tensor

    def __init__(self, *, released: Tensor, inputs: Tensor, input_box: tuple[float, float], width: int) -> None:
        super().__init__()
        self.input_box = input_box
        spread = released.std(0, correction=0)
        # coordinates that (almost) never move keep the scale of the others, else their jumps would swamp everything
        floor = max(0.05 * float(spread.square().mean().sqrt()), 1e-30)
        self.register_buffer("centre", released.mean(0))
        self.register_buffer("spread", spread.clamp_min(floor))
        self.register_buffer("mean_record", inputs.mean(0))
        self.dense = nn.Sequential(
            nn.Flatten(), nn.Linear(released[0].numel(), width), nn.ReLU(), nn.Linear(width, inputs[0].numel())
        )
        self.maps: nn.Sequential | None = None
        if released.dim() == 4 and inputs.dim() == 4:
            channels = max(width // 8, 8)
            self.maps = nn.Sequential(
                nn.Conv2d(released.shape[1], channels, 3, padding=1),
                nn.ReLU(),
                _Resize(tuple(inputs.shape[2:])),
                nn.Conv2d(channels, channels, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(channels, inputs.shape[1], 3, padding=1),
            )
        for path in (self.dense, self.maps):
            if path is not None:
                for parameter in path[-1].parameters():
                    nn.init.zeros_(parameter)

    def forward(self, released: Tensor) -> Tensor:
        """Rebuild records from released activations, shape (batch, ...); not yet clamped into the box."""
        scaled = (released - self.centre) / self.spread
        low, high = self.input_box
        change: Tensor = self.dense(scaled).reshape(-1, *self.mean_record.shape)
        if self.maps is not None:
            change = change + self.maps(scaled)
        return self.mean_record + (high - low) * change


class _Resize(nn.Module):
    def __init__(self, size: tuple[int, ...]) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return interpolate(x, size=self.size, mode="bilinear", align_corners=False)


def train_decoder(
    release: Callable[[Tensor], Tensor],
    auxiliary_inputs: Tensor,
    *,
    input_box: tuple[float, float],
    steps: int = 400,
    batch_size: int = 64,
    learning_rate: float = 2e-3,
    width: int = 256,
    generator: torch.Generator,
) -> nn.Module:
    """Fit a decoder by least squares to the release of auxiliary records; every step sees noise drawn afresh.

    Args:
        release: what the attacker can imitate, since head and noise scale are known: inputs to noised activations of
            any shape, flat or (channels, height, width). A head alone serves for releases without noise.
        auxiliary_inputs: records of the attacker's own, shape (batch, *input_shape), at least 10; never those attacked.
        input_box: (low, high) of the records.
        steps: AdamW steps.
        batch_size: records a step.
        learning_rate: peak; it falls to 0 along a cosine.
        width: hidden units.
        generator: for weights and batches; torch's global generator is left as it was (`release` has its own).

    Returns:
        The decoder, in eval mode, at the step that did best on a tenth of the auxiliary records that it does not learn
        from; step 0, the mean record, is among them.

    Raises:
        ValueError: too few records, values out of range, or a release that is not finite or mixes up rows.

    Guarantee:
        None about the record: a better decoder may exist.

    Source:
        Dosovitskiy & Brox 2016, "Inverting visual representations with convolutional networks".
    """
    inputs = check_batch(auxiliary_inputs, what="auxiliary_inputs")
    box = check_box(input_box)
    if len(inputs) < 10:
        raise ValueError(f"auxiliary_inputs holds {len(inputs)} records: a decoder needs at least 10; pass more")
    steps = check_integer("steps", steps, minimum=1)
    batch_size = check_integer("batch_size", batch_size, minimum=1)
    width = check_integer("width", width, minimum=1)
    learning_rate = check_real("learning_rate", learning_rate, minimum=0.0, exclusive=True, fix="pass 2e-3")
    order = torch.randperm(len(inputs), generator=generator).to(inputs.device)
    kept, learnt = inputs[order[: len(inputs) // 10]], inputs[order[len(inputs) // 10 :]]
    kept_released = _release(release, kept)

    seed = int(torch.randint(2**31, (1,), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sample = _release(release, learnt[: 10 * batch_size])
        decoder = Decoder(released=sample, inputs=learnt[: 10 * batch_size], input_box=box, width=width).to(sample)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=learning_rate, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    best, best_error = copy.deepcopy(decoder.state_dict()), _error(decoder, kept_released, kept)
    every = max(1, steps // CHECKS)
    blocks = max(1, BLOCK // batch_size)  # released together, since each call may check the whole head anew
    for step in range(1, steps + 1):
        if step % blocks == 1 or blocks == 1:
            chosen = torch.randint(len(learnt), (blocks, batch_size), generator=generator).to(inputs.device)
            pool = _release(release, learnt[chosen.flatten()]).split_with_sizes([batch_size] * blocks)
        released, records = pool[(step - 1) % blocks], learnt[chosen[(step - 1) % blocks]]
        with torch.enable_grad():
            loss = mse_loss(decoder(released), records)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        schedule.step()
        if step % every == 0 or step == steps:
            error = _error(decoder, kept_released, kept)
            if error < best_error:
                best, best_error = copy.deepcopy(decoder.state_dict()), error
    decoder.load_state_dict(best)
    return decoder.eval().requires_grad_(False)


def reconstruct(decoder: nn.Module, released: Tensor) -> Tensor:
    """Rebuild records from released activations.

    Args:
        decoder: from `train_decoder`.
        released: shape (batch, ...), as the decoder was trained on.

    Returns:
        Records in the box, shape (batch, *input_shape), without gradient.

    Raises:
        ValueError: another shape, NaN or inf.
    """
    if not isinstance(decoder, Decoder):
        raise ValueError(f"decoder is a {type(decoder).__name__}: its box is not known; pass one from train_decoder")
    released = check_batch(released, what="released", shape=tuple(decoder.centre.shape))
    with torch.no_grad():
        records: Tensor = decoder(released).clamp(*decoder.input_box)
    return records


def _release(release: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return check_rows(release(inputs), what="release", count=len(inputs)).detach()


def _error(decoder: Decoder, released: Tensor, inputs: Tensor) -> float:
    return float((reconstruct(decoder, released) - inputs).double().square().mean())
