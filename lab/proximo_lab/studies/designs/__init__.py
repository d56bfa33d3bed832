"""The studies, as one tuple; the first are those on which most hangs."""

from proximo_lab.studies.designs.clipping import CLIP_HIGHER, CLIP_RATIO, CLIPPED_TOKENS, UNIFORM_ADVANTAGES
from proximo_lab.studies.designs.course import DEAD_GROUPS, FIRST_SUCCESS
from proximo_lab.studies.designs.drift_warning import DRIFT_LEAD
from proximo_lab.studies.designs.five import FIVE_CHAIN, FIVE_LENGTH, FIVE_MIXTURE
from proximo_lab.studies.designs.gates import DUAL_CLIP, SAPO_GSPO, SAPO_SEQUENCE
from proximo_lab.studies.designs.gspo_band import GSPO_BAND
from proximo_lab.studies.designs.length import DAPO_LADDER, OVERLONG
from proximo_lab.studies.designs.mixtures import MIXTURE
from proximo_lab.studies.designs.pass_at_k import DPO_GRPO, RECOVERY
from proximo_lab.studies.designs.sapo import SAPO_STUDY
from proximo_lab.studies.designs.signals import GROUP_SIZE, KL, NOISY_REWARD, REWARD_HACKING, STD
from proximo_lab.studies.designs.values import VALUE_LENGTH
from proximo_lab.studies.designs.weights import TOKEN_MEAN
from proximo_lab.studies.study import Study

STUDIES: tuple[Study, ...] = (
    CLIP_HIGHER,
    DAPO_LADDER,
    TOKEN_MEAN,
    GSPO_BAND,
    MIXTURE,
    SAPO_STUDY,
    VALUE_LENGTH,
    OVERLONG,
    FIVE_LENGTH,
    FIVE_CHAIN,
    FIVE_MIXTURE,
    UNIFORM_ADVANTAGES,
    CLIP_RATIO,
    CLIPPED_TOKENS,
    DUAL_CLIP,
    SAPO_SEQUENCE,
    SAPO_GSPO,
    KL,
    REWARD_HACKING,
    GROUP_SIZE,
    NOISY_REWARD,
    STD,
    DEAD_GROUPS,
    FIRST_SUCCESS,
    DRIFT_LEAD,
    DPO_GRPO,
    RECOVERY,
)
