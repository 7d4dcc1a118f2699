"""A service without Ray: one shard in this process."""

import asyncio
from threading import Lock

from dltta.serving.cluster import Cluster
from dltta.serving.shard import Shard


class InProcess(Cluster):
    """A cluster of one shard."""

    def start(self):
        self.shard, self.started, self._one_at_a_time = Shard(self.settings), True, Lock()

    def stop(self):
        self.shard.close()
        self.started = False

    async def _call(self, key, method, *args, **kwargs):
        def call():
            with self._one_at_a_time:  # as an actor
                return getattr(self.shard, method)(*args, **kwargs)

        return await asyncio.to_thread(call)

    async def memory(self, patience=1.0):
        return [{**self.shard.memory(), "shard": 0}]
