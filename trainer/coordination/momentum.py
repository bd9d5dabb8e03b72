"""How an update goes through momentum: the heavy ball of SGD, or a momentum that looks ahead of stale gradients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Momentum:
    """v = decay * v + u for an update u, the rate times the sum of its gradients. Then w -= v, or, where share is given,
    w -= u + share * v. Both move w by u / (1 - m) in the end."""

    decay: float
    share: float | None = None


def heavy_ball(coefficient: float) -> Momentum:
    """SGD's momentum (Polyak 1964; torch.optim.SGD at a constant rate): v decays by m an update.

    With asynchronous updates it decays N times a round of N workers, and every gradient is a round old: for a quadratic
    at m = 0.9 the largest stable rate is 30 times less with 12 workers than with one."""
    return Momentum(coefficient)


def look_ahead(coefficient: float, update_size: int, num_workers: int) -> Momentum:
    """Nesterov's momentum over rounds: v decays by m in N gradients, whatever an update takes of them, and w is where
    momentum will have moved the parameters a round later, which is when a gradient at w is used.

    With d = m^(K/N) for updates of K gradients, momentum moves parameters by (1-d)/(1-m) * v an update, so by d * v over the
    round to come; that w starts with this shift turns the two steps into the one above. It does with one vector, for
    workers of any speed, what DANA does with one a worker (Hakimi et al. 2019, Taming Momentum in a Distributed
    Asynchronous Environment, algorithm 4). With N = K it is torch.optim.SGD(nesterov=True)."""
    decay = float(coefficient ** (update_size / num_workers))
    return Momentum(decay, (1 - decay) * coefficient / (1 - coefficient))
