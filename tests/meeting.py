"""Several ranks played by threads, which meet where processes would."""

import threading

from whet.errors import WhetError
from whet.parallel.ranks import Ranks


class Meeting(Ranks):
    """One of several ranks, each in a thread."""

    def __init__(self, rank, table, barrier):
        self.rank, self.size, self.table, self.barrier = rank, len(table), table, barrier

    def all_gather(self, value):
        self.table[self.rank] = value
        self.barrier.wait(timeout=10)
        found = list(self.table)
        self.barrier.wait(timeout=10)
        return found


def together(size, work):
    """What each rank's `work(ranks)` returns, or the error that it raises."""
    table, barrier, found = [None] * size, threading.Barrier(size), [None] * size

    def one(rank):
        try:
            found[rank] = work(Meeting(rank, table, barrier))
        except WhetError as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=20)
    assert not any(t.is_alive() for t in threads)
    return found
