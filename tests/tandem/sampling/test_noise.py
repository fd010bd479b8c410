"""The random numbers: published values, golden values, independence."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tandem.sampling.noise import as_int64, exponentials, position_state, splitmix64

SEEDS = (0, 1, 7, 2**31, 2**63 - 1, 2**63, 2**64 - 1)


def state_column(*states: int) -> torch.Tensor:
    return torch.tensor([as_int64(state) for state in states]).unsqueeze(1)


def test_splitmix64_gives_its_published_outputs() -> None:
    """The first outputs of the authors' C program for the seed 1234567."""
    assert [splitmix64(1234567, number) for number in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_any_64_bits_survive_the_way_to_a_signed_number() -> None:
    for bits in (*SEEDS, 0x9E3779B97F4A7C15):
        assert as_int64(bits) % 2**64 == bits
        assert int(torch.tensor(as_int64(bits))) % 2**64 == bits


def test_tensors_hold_the_same_numbers_as_integers() -> None:
    states = [position_state(seed, index) for seed in SEEDS for index in (0, 1, 10**6)]
    token_ids = [0, 1, 2, 63, 49_151, 128_000]
    drawn = exponentials(state_column(*states), torch.tensor(token_ids))
    uniform = torch.tensor(
        [[((splitmix64(state, it) >> 12) + 0.5) / 2**52 for it in token_ids] for state in states],
        dtype=torch.float64,
    )
    torch.testing.assert_close(drawn, -uniform.log(), rtol=1e-14, atol=1e-15)


def test_the_numbers_of_a_seed_stay_what_they_are() -> None:
    """A change here changes what every seeded request gives."""
    assert position_state(7, 0) == 13309476754707697221
    drawn = exponentials(state_column(position_state(7, 3)), torch.tensor([0, 1, 49_151]))
    golden = [[0.9869801375643281, 0.7996028393589005, 1.370588166482227]]
    expected = torch.tensor(golden, dtype=drawn.dtype)
    torch.testing.assert_close(drawn, expected, rtol=1e-14, atol=1e-15)


def test_no_draw_is_zero_or_infinite() -> None:
    """The largest and the smallest number that the generator can make."""
    gamma, first, second = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

    def state_for(bits: int) -> int:
        """Run the mix backwards, so that token 0 gets ``bits``."""
        for shift, factor in ((31, second), (27, first), (30, 1)):
            undone = bits
            for _ in range(64 // shift + 1):
                undone = bits ^ (undone >> shift)
            bits = undone * pow(factor, -1, 2**64) % 2**64
        return (bits - gamma) % 2**64

    states = [state_for(0), state_for(2**64 - 1)]
    assert [splitmix64(state, 0) for state in states] == [0, 2**64 - 1]
    column = torch.tensor([[as_int64(state)] for state in states])
    largest, smallest = exponentials(column, torch.tensor([0])).flatten().tolist()
    assert largest == pytest.approx(53 * math.log(2))
    assert 0 < smallest < 1e-15


def test_a_number_depends_on_its_own_place_only() -> None:
    states = [position_state(seed, 3) for seed in SEEDS]
    token_ids = torch.arange(1000)
    together = exponentials(state_column(*states), token_ids)
    for row, state in enumerate(states):
        assert torch.equal(exponentials(state_column(state), token_ids)[0], together[row])
        some = torch.tensor([999, 5, 64])
        assert torch.equal(exponentials(state_column(state), some)[0], together[row, some])


def test_no_two_positions_share_their_numbers() -> None:
    places = list(itertools.product((*range(40), *SEEDS[3:]), range(50)))
    states = [position_state(seed, index) for seed, index in places]
    assert len(set(states)) == len(places)
    drawn = exponentials(state_column(*states), torch.arange(16))
    assert len(drawn.unique()) == drawn.numel()


def test_numbers_are_spread_exponentially() -> None:
    """Kolmogorov-Smirnov over tokens, over positions and over seeds; 1.95 is the 0.1 % bound."""
    count = 20_000
    along = {
        "tokens": exponentials(state_column(position_state(5, 0)), torch.arange(count)),
        "positions": exponentials(
            state_column(*(position_state(5, index) for index in range(count))), torch.tensor([9])
        ),
        "seeds": exponentials(
            state_column(*(position_state(seed, 2) for seed in range(count))), torch.tensor([9])
        ),
    }
    for name, drawn in along.items():
        uniform = 1.0 - (-drawn.flatten().sort().values).exp()
        distance = (uniform - (torch.arange(count) + 0.5) / count).abs().max() + 0.5 / count
        assert float(distance) * count**0.5 < 1.95, name


def test_neighbouring_places_are_not_correlated() -> None:
    states = [position_state(seed, index) for seed in range(100) for index in range(100)]
    field = exponentials(state_column(*states), torch.arange(8)).view(100, 100, 8) - 1.0
    shifts = {
        "seed": (field[1:], field[:-1]),
        "position": (field[:, 1:], field[:, :-1]),
        "token": (field[..., 1:], field[..., :-1]),
    }
    for name, (left, right) in shifts.items():
        products = left * right
        z_score = float(products.mean()) * products.numel() ** 0.5
        assert abs(z_score) < 4.0, name
