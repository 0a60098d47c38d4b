"""Heads of the size of the digits data, and a training loop, for tests of sensitivity control."""

import torch
from sklearn.datasets import load_digits
from torch import nn


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


def make_head(kind):
    torch.manual_seed(0)
    if kind == "conv":
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()
        )
    if kind == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 32), nn.ReLU())
    return nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(1, 4, 3, padding=1), Residual(4), nn.ReLU(), nn.Flatten())


def train(head, *, num_steps, after_step, lr=0.1):
    """Train the head and a free linear tail on digits; give the loss before every step."""
    digits = load_digits()
    x = torch.tensor(digits.images[:600], dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target[:600])
    with torch.no_grad():
        width = head(x[:1]).shape[1]
    torch.manual_seed(1)
    tail = nn.Linear(width, 10)
    optimiser = torch.optim.SGD([*head.parameters(), *tail.parameters()], lr=lr, momentum=0.9)
    losses = []
    for step in range(num_steps):
        batch = torch.arange(step * 100, step * 100 + 100) % 600
        loss = nn.functional.cross_entropy(tail(head(x[batch])), labels[batch])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
        after_step(head)
    return losses
