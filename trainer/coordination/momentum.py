"""How an update goes through momentum: the heavy ball of SGD, or a momentum that looks ahead of stale gradients."""

from __future__ import annotations

from dataclasses import dataclass

AHEAD = 1.5  # rounds


@dataclass(frozen=True)
class Momentum:
    """v = decay * v + u for an update u, the rate times the sum of its gradients; then w -= at_once * u + share * v.
    In the end w has moved by u / (1 - m)."""

    decay: float
    at_once: float = 0.0
    share: float = 1.0


def heavy_ball(coefficient: float) -> Momentum:
    """SGD's momentum (Polyak 1964; torch.optim.SGD at a constant rate): v decays by m an update.

    With asynchronous updates it decays N times a round of N workers, and every gradient is a round old: for a quadratic
    at m = 0.9 the largest stable rate is 30 times less with 12 workers than with one."""
    return Momentum(coefficient)


def look_ahead(coefficient: float, update_size: int, num_workers: int, rounds: float = AHEAD) -> Momentum:
    """Nesterov's momentum over rounds: v decays by m in N gradients, whatever an update takes of them, and w is where
    momentum will have moved the parameters so many rounds later: a gradient at w is used when it has.

    With d = m^(K/N) for updates of K gradients, momentum moves parameters by (1-d)/(1-m) * v an update, so by
    (1-m^r)/(1-m) * d v over r rounds to come; that w starts with this shift turns the two steps into the one above. One
    round is what DANA does with a vector a worker (Hakimi et al. 2019, Taming Momentum in a Distributed Asynchronous
    Environment, algorithm 4), and, with N = K, torch.optim.SGD(nesterov=True). One and a half bears the largest curvature:
    the look-ahead also makes up for the gradients of others that come in between."""
    decay = float(coefficient ** (update_size / num_workers))
    later = coefficient**rounds / (1 - coefficient)
    return Momentum(decay, at_once=1 / (1 - coefficient) - later, share=(1 - decay) * later)
