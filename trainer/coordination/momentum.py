"""Momentum rules: SGD's heavy ball, and a look-ahead momentum for stale gradients."""

from __future__ import annotations

from dataclasses import dataclass

AHEAD = 1.5  # rounds


@dataclass(frozen=True)
class Momentum:
    """A momentum rule: v = decay * v + u, then w -= at_once * u + share * v, for an update u.

    u is the rate times a sum of gradients; an ``at_once`` of 0 means w -= v. In the limit an update moves w by u / (1 -
    m)."""

    decay: float
    at_once: float = 0.0
    share: float = 1.0

    @property
    def shift(self) -> float:
        """The multiple of v by which w is ahead of the parameters that momentum has moved so far; 0 for heavy ball."""
        return self.at_once * self.decay


def heavy_ball(coefficient: float) -> Momentum:
    """Return SGD's momentum (Polyak 1964; torch.optim.SGD at a constant rate): v decays by m per update.

    With asynchronous updates v decays N times per round of N workers, and gradients are about a round old. For a
    quadratic and m = 0.9 the largest stable rate is 30 times smaller with 12 workers than with one. coefficient: m."""
    return Momentum(coefficient)


def nesterov(coefficient: float) -> Momentum:
    """Return Nesterov's momentum as torch.optim.SGD(nesterov=True) has it: v decays by m per update, w -= u + m v.

    coefficient: m."""
    return Momentum(coefficient, at_once=1.0, share=coefficient)


def look_ahead(coefficient: float, update_size: int, num_workers: int, rounds: float = AHEAD) -> Momentum:
    """Return Nesterov's momentum over rounds of N gradients. It is used for stale gradients.

    v decays by m per N gradients, independent of the number of gradients per update. w is the point to which momentum
    will have moved the parameters ``rounds`` rounds later, when a gradient computed at w is used.

    With d = m^(K/N) for updates of K gradients, momentum moves the parameters by (1-d)/(1-m) * v per update, and so by
    (1-m^r)/(1-m) * d v over the next r rounds. Because w contains this shift from the start, the two steps become the
    one of Momentum. One round equals torch.optim.SGD(nesterov=True) for N = K, and DANA for one worker; with more, DANA
    has a vector per worker (Hakimi et al. 2019, Taming Momentum in a Distributed Asynchronous Environment, algorithm 4)
    where this one spreads the momentum of each gradient over a round. One and a half rounds tolerate the largest
    curvature, because the look-ahead also covers the gradients of other workers that arrive in between.

    Args:
        coefficient: m.
        update_size: K, gradients per update.
        num_workers: N.
        rounds: r.
    """
    decay = float(coefficient ** (update_size / num_workers))
    later = coefficient**rounds / (1 - coefficient)
    return Momentum(decay, at_once=1 / (1 - coefficient) - later, share=(1 - decay) * later)
