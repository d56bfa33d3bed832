"""The studies."""

from proximo.studies.designs.clipping import CLIP_HIGHER
from proximo.studies.study import Study

STUDIES: tuple[Study, ...] = (CLIP_HIGHER,)
