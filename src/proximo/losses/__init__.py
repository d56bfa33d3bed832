"""The mathematics: functions of tensors, independent of models, text and files.

Every piece is a frozen dataclass that can be called. All are exported here:
`from proximo.losses import Clip, TokenMean`.
"""

from proximo.losses.advantage_inputs import *
from proximo.losses.objective import *
from proximo.losses.pairwise import *
from proximo.losses.pieces.advantages import *
from proximo.losses.pieces.corrections import *
from proximo.losses.pieces.credit import *
from proximo.losses.pieces.divergences import *
from proximo.losses.pieces.extras import *
from proximo.losses.pieces.filters import *
from proximo.losses.pieces.gates import *
from proximo.losses.pieces.protocols import *
from proximo.losses.pieces.ratios import *
from proximo.losses.pieces.selection import *
from proximo.losses.pieces.shaping import *
from proximo.losses.pieces.weights import *
from proximo.losses.records import *
