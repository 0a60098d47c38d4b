"""FedAvg's mean, against hand work."""

import pytest
import torch
from torch import nn

from asfl_privacy.federated.weights import average_weights, count_bytes, load_weights, read_weights


def test_the_mean_is_weighted_by_records_over_the_clients_given():
    """Hand work: (1·3 + 5·1)/4 = 2. Catches an unweighted mean (3) and weights over all N clients."""
    results = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([5.0])}]
    assert average_weights(results, num_records=[3, 1])["w"].item() == 2.0


def test_running_statistics_are_averaged_like_parameters():
    """Hand work: (1·0 + 3·2)/4 = 1.5. Catches buffers taken from one client, or forgotten."""
    results = [{"norm.running_mean": torch.tensor([0.0])}, {"norm.running_mean": torch.tensor([2.0])}]
    assert average_weights(results, num_records=[1, 3])["norm.running_mean"].item() == 1.5


def test_one_clients_mean_is_its_own_weights_bit_for_bit():
    weights = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    assert torch.equal(average_weights([weights], num_records=[7])["w"], weights["w"])


def test_integer_counters_stay_integers():
    results = [{"n": torch.tensor(4)}, {"n": torch.tensor(7)}]
    mean = average_weights(results, num_records=[1, 1])["n"]
    assert mean.dtype == torch.int64
    assert mean.item() == 6  # 5.5 to even


def test_diverged_weights_are_refused():
    with pytest.raises(ValueError, match="training diverged; lower lr"):
        average_weights([{"w": torch.tensor([float("nan")])}], num_records=[1])


def test_results_and_counts_must_agree():
    with pytest.raises(ValueError, match="one count ≥ 1 a result"):
        average_weights([], num_records=[])
    with pytest.raises(ValueError, match="one count ≥ 1 a result"):
        average_weights([{"w": torch.zeros(1)}], num_records=[0])


def test_read_weights_shares_nothing_with_the_network_and_load_restores_them():
    """Catches models passed between clients by reference."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    weights = read_weights(net)
    with torch.no_grad():
        net[0].weight.add_(1.0)
        net[1].running_mean.add_(1.0)
    assert not torch.equal(net[0].weight, weights["0.weight"])
    load_weights(net, weights)
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())


def test_bytes_are_of_every_parameter_and_buffer():
    """Hand work: linear 6·4, norm weight, bias, mean, variance 4·2·4, counter 8."""
    assert count_bytes(read_weights(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))) == 24 + 32 + 8
