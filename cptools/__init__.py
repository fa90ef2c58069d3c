"""Context parallelism for long-context inference, as primitives that can be tested without a GPU.

The way of one prompt through these names, top to bottom:

==========================  =================================================================
`ParallelConfig`            the sizes of a world (pcp, dcp, tp, ep, dp), checked without torch.distributed
`ParallelGroups`            the process groups of such a world (`init_world` joins it); passed down, never global
`LoadBalancedCPShard`       cuts prompts over PCP ranks: `plan` (a `CPPlan`), `shard`, `unshard`
`KVLayout`                  which rank owns the cached row of a token, and at which local index
`RoundRobinKVShard`         the same with tensors: slots, localised top-k, gather of a context
`Partial`, `merge_partials` attention over part of the keys with its log-sum-exp, and their exact merge
`LSEMerge`                  that merge across the ranks of a group
`TensorParallel`            heads and feed-forward widths over ranks: sums of partial products, heads put together
`ExpertExchange`            rows to the ranks of their experts and back; `SharedRows` for rows that ranks hold alike
`Lockstep`                  replicas that share experts step together
`HostKVPool`                rows in pages of (pinned) host memory, reference counted
`plan_reshard`, `Run`       the copies that turn one KV layout into another
==========================  =================================================================

`cptools.formats` holds the bytes of a cached row, `cptools.kernels` one folder per op with its reference.
"""

from cptools.cp_plan import CPPlan
from cptools.cp_shard import LoadBalancedCPShard
from cptools.expert_exchange import ExpertExchange
from cptools.host_pool import HostKVPool
from cptools.kv_shard import RoundRobinKVShard
from cptools.layout import KVLayout
from cptools.lockstep import Lockstep
from cptools.lse_merge import LSEMerge
from cptools.page_allocator import PoolExhausted
from cptools.parallel import ParallelGroups, init_world
from cptools.parallel_config import ParallelConfig
from cptools.partial import Partial, merge_partials
from cptools.reshard import Run, plan_reshard
from cptools.shared_rows import SharedRows
from cptools.tensor_parallel import TensorParallel

__all__ = [
    "CPPlan",
    "ExpertExchange",
    "HostKVPool",
    "KVLayout",
    "LSEMerge",
    "LoadBalancedCPShard",
    "Lockstep",
    "ParallelConfig",
    "ParallelGroups",
    "Partial",
    "PoolExhausted",
    "RoundRobinKVShard",
    "Run",
    "SharedRows",
    "TensorParallel",
    "init_world",
    "merge_partials",
    "plan_reshard",
]

__version__ = "0.1.0"
