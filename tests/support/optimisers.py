"""Optimisers of a user's own, as ``--optimiser tests.support.optimisers:FUNCTION`` names them."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop


def adam(parameters: list[Any]) -> Optimizer:
    return Adam(parameters)


def adamw(parameters: list[Any]) -> Optimizer:
    return AdamW(parameters, weight_decay=0.1, amsgrad=True)


def nesterov(parameters: list[Any]) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def rmsprop(parameters: list[Any]) -> Optimizer:
    return RMSprop(parameters, momentum=0.5, centered=True)


def plain(parameters: list[Any]) -> Optimizer:
    return SGD(parameters, lr=0.1)


class Clipping(SGD):
    """Divides the gradient by its norm, which depends on all parameters."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad /= parameter.grad.norm()
        return super().step(closure)


class Secretive(SGD):
    """Keeps a state that its state_dict does not have."""

    steps = 0.0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.grad /= self.steps
        return super().step(closure)


def clipping(parameters: list[Any]) -> Optimizer:
    return Clipping(parameters, lr=0.1)


def secretive(parameters: list[Any]) -> Optimizer:
    return Secretive(parameters, lr=0.1)


def lbfgs(parameters: list[Any]) -> Optimizer:
    return torch.optim.LBFGS(parameters)


def impatient(parameters: list[Any]) -> Optimizer:
    raise KeyError("betas")


def leaving(parameters: list[Any]) -> Optimizer:
    raise SystemExit(0)


class Careless(SGD):
    """Looks for an entry that its group does not have."""

    def step(self, closure: Any = None) -> Any:
        return self.param_groups[0]["warmup"]


def careless(parameters: list[Any]) -> Optimizer:
    return Careless(parameters, lr=0.1)


class Replacing(SGD):
    """Makes a new tensor of its parameter in every step."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - self.param_groups[0]["lr"] * parameter.grad


def replacing(parameters: list[Any]) -> Optimizer:
    return Replacing(parameters, lr=0.1)


class Scheduled(SGD):
    """Looks its factor up by a counter that must be an int."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            parameter.grad *= [1.0, 0.5, 0.25, 0.125][state.setdefault("step", 0)]
            state["step"] += 1
        return super().step(closure)


def scheduled(parameters: list[Any]) -> Optimizer:
    return Scheduled(parameters, lr=0.1)


def nothing(parameters: list[Any]) -> None:
    return None
