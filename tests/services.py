"""A service without Ray: one shard in this process."""

import asyncio

from dltta.serving.cluster import Cluster
from dltta.serving.shard import Shard


class InProcess(Cluster):
    """A cluster of one shard."""

    def start(self):
        self.shard, self.started = Shard(self.settings), True

    def stop(self):
        self.shard.close()
        self.started = False

    async def _call(self, key, method, *args, **kwargs):
        return await asyncio.to_thread(getattr(self.shard, method), *args, **kwargs)

    async def memory(self, patience=1.0):
        return [{**self.shard.memory(), "shard": 0}]
