"""The studies, as one tuple; the first are those on which most hangs."""

from proximo.studies.designs.clipping import CLIP_HIGHER, CLIP_RATIO, UNIFORM_ADVANTAGES
from proximo.studies.designs.course import DEAD_GROUPS, FIRST_SUCCESS
from proximo.studies.designs.gates import DUAL_CLIP, GSPO_BAND, SAPO_GSPO, SAPO_STUDY
from proximo.studies.designs.signals import GROUP_SIZE, KL, NOISY_REWARD, STD
from proximo.studies.study import Study

STUDIES: tuple[Study, ...] = (
    CLIP_HIGHER,
    SAPO_STUDY,
    GSPO_BAND,
    UNIFORM_ADVANTAGES,
    CLIP_RATIO,
    DUAL_CLIP,
    SAPO_GSPO,
    KL,
    GROUP_SIZE,
    NOISY_REWARD,
    STD,
    DEAD_GROUPS,
    FIRST_SUCCESS,
)
