"""Runs whose home is anywhere: their files and checkpoints, and writers that are killed there.

A ``StorePlace`` of a local folder goes the ways of HDFS, but for the network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.places import STORE
from tests.unit.test_checkpoint import numbers, state_of, write
from trainer.checkpoints.read import (
    read_vector,
    whole,
)
from trainer.home.place import StorePlace
from trainer.run_files import CHECKPOINTS

pytestmark = pytest.mark.full


def test_on_hdfs_a_lost_datanode_costs_no_checkpoint(hdfs: Any) -> None:
    root = StorePlace(f"{hdfs.uri}/lost-datanode/{CHECKPOINTS}", STORE)
    write(root, state_of(1))
    hdfs.kill_datanode(0)
    try:
        write(root, state_of(2))  # the NameNode still sends writers to it
        assert whole(root) == [1, 2]
        for version in (1, 2):
            np.testing.assert_array_equal(read_vector(root, version), numbers(version, 10))
    finally:
        hdfs.restart_datanode(0)
        hdfs.wait_live(3)
