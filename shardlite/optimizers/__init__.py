"""Steps of whole parameters: each parameter has one owner, a rank that steps the whole parameter.

In: shards with averaged gradients, and an optimizer class of the program. Out: stepped shards, with the bits of the
same optimizer on unsharded parameters. `members.py` describes the parameters, `assignment.py` chooses owners,
`steps.py` steps the parameters of one unit, and `pipeline.py` moves pieces to the owners and back, unit by unit. Read
`optimizer.py` first.
"""

from shardlite.whole.assignment import Owned, assign, describe, ranges_of
from shardlite.whole.groups import is_hidden_matrix
from shardlite.whole.optimizer import WholeParameters
