"""What torchrun's variables say, and programs that it did not start."""

import pytest

from whet.errors import ConfigError
from whet.parallel.processes import join_processes
from whet.parallel.torchrun_env import check_torchrun_env, rank, require_single_process, world_size


def test_ranks_are_torchruns_and_a_program_of_one_process_refuses_several(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (rank(), world_size()) == (0, 1)
    require_single_process("an evaluation")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (rank(), world_size()) == (3, 4)
    check_torchrun_env()
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 4, and an evaluation runs in one process.*start one process"):
        require_single_process("an evaluation")


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "x"), ("RANK", "-1"), ("WORLD_SIZE", "abc"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "9" * 5000),
     ("LOCAL_RANK", "-1"), ("LOCAL_RANK", "1.0"), ("RANK", "\u0662")],
    ids=lambda value: value[:8],
)  # fmt: skip
def test_a_variable_of_torchruns_that_is_no_such_number_is_named_with_its_value(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{name}='{value[:20]}.* in the environment must be a whole number from"):
        check_torchrun_env()


def test_a_rank_without_a_job_of_several_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="RANK is 1 in the environment, and WORLD_SIZE is 1; unset RANK"):
        check_torchrun_env()


def test_variables_of_torchruns_that_are_empty_count_as_unset(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
    assert (rank(), world_size()) == (0, 1)
    check_torchrun_env()


def test_processes_that_torchrun_did_not_start_are_told_to_use_it(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"the 2 processes can't reach each other: .*; start them with torchrun"):
        join_processes()
