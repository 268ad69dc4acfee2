"""torch_xla's own counts of what it compiled in this process."""

from dataclasses import dataclass

import torch_xla
import torch_xla.debug.metrics as met


@dataclass(frozen=True)
class Compilations:
    """All that tells of a compilation; two of these are equal if nothing was compiled between."""

    #: Graphs that were compiled since none in the cache was theirs.
    uncached: int
    #: Compilations that were timed.
    timed: int
    #: Graphs in the cache.
    graphs: int
    #: Fetches of sharded tensors: each compiles, and none of the others counts it.
    replicated: int

    @classmethod
    def so_far(cls) -> "Compilations":
        timed = met.metric_data("CompileTime")
        return cls(
            uncached=met.counter_value("UncachedCompile") or 0,
            timed=timed[0] if timed else 0,
            graphs=torch_xla._XLAC._xla_get_num_cached_compilation_graph(),
            replicated=met.counter_value("ReplicateShardedData") or 0,
        )
