"""Divides a step among ranks by PyTorch's own engines: FSDP2, DDP and DTensor. It has the mesh of ranks, the
units that are gathered together, the plan that divides a layer, and the sums that ranks form about a step.
"""

from harness.parallel.deferred import Deferred, loaded_by_one_thread
from harness.parallel.dtypes import DTYPES
from harness.parallel.engines import divide, summed_at_the_end
from harness.parallel.mesh import ALONE, Ranks, lost_rank, ranks_of
from harness.parallel.units import blocks_of, without_adapter
