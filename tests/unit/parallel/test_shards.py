"""Copies of tensors for an asynchronous checkpoint."""

import pytest
import torch
from torch.distributed.checkpoint.staging import DefaultStager

from whet.parallel.shards import Stager


@pytest.mark.parametrize("closes", [False, True])  # torch 2.11's stager closes after a copy
def test_tensors_are_copied_as_often_as_one_likes(closes, monkeypatch):
    stage = DefaultStager.stage

    def once(self, tensors):
        copies = stage(self, tensors)
        if closes:
            self._state_dict_stager.close()
        return copies

    monkeypatch.setattr(DefaultStager, "stage", once)
    stager, tensors = Stager(), {"w": torch.arange(3.0)}
    first = stager.stage(tensors)["w"]
    assert first.tolist() == [0, 1, 2] and first is not tensors["w"]
    tensors["w"] += 1
    assert stager.stage(tensors)["w"].tolist() == [1, 2, 3]
