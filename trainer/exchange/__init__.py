"""The exchanges by name."""

from __future__ import annotations

from pipeline.core.specs import registry
from trainer.exchange.all_reduce import AllReduce
from trainer.exchange.base import Exchange
from trainer.exchange.d_psgd import DPSGD
from trainer.exchange.matcha import MATCHA
from trainer.exchange.parameter_server import ParameterServer
from trainer.exchange.strategy_switch import StrategySwitch
from trainer.exchange.sync_switch import SyncSwitch

EXCHANGES: dict[str, type[Exchange]] = registry(ParameterServer, AllReduce, DPSGD, MATCHA, SyncSwitch, StrategySwitch)

__all__ = ["EXCHANGES", "Exchange"]
