"""Published claims, one row each: what is claimed, by whom, and what is known of it here apart from the studies.

Rows that a study answers get their verdict from its results. The others have a verdict with the command that repeats
it, or the reason why there is none at this size.
"""

from dataclasses import dataclass
from typing import Literal

from proximo_lab.studies.verdict import Word

FIVE, MOE, MEMORY, MISMATCH, LOG = "five.md", "moe.md", "memory.md", "../guides/mismatch.md", "../log.md"
Known = Word | Literal["", "exact", "exactly wrong"]


@dataclass(frozen=True)
class Claim:
    number: int
    claim: str
    source: str
    verdict: Known = ""
    """Verdict from a page other than a study's, or from arithmetic (exact, exactly wrong)."""
    measured: str = ""
    """Result that was measured, with its interval."""
    command: str = ""
    """Command that repeats it."""
    page: str = ""
    """Page that has it, seen from docs/studies."""
    reason: str = ""
    """Reason why it is not measured at this size, and what size would do."""
    decides: str = ""
    """Name of the study whose first contrast gives the verdict, where the first of all is not meant."""
    not_needed: Literal["", "left out", "added"] = ""
    """Direction of the contrasts, where the claim is that something is not needed. Left out: the claim holds where
    the interval excludes a loss as large as what counts, and not only where there is a gain. Added: it holds where the
    interval excludes a gain as large."""


# fmt: off
CLAIMS: tuple[Claim, ...] = (
    Claim(1, "GRPO has no value model and needs fewer models and less memory than PPO", "DeepSeekMath §4.1", "exact", "models held: PPO with a value model of its own 3, with a reward model 4; GRPO 2; DAPO, GSPO and SAPO 1. Weights, gradients and moments at 0.8 M parameters: 19.2, 16.0 and 12.8 MB, counted. Peaks of a step of 0.6 B parameters on one H200 (16 × 8 completions of 512 tokens after 512): PPO with a value model of its own 56.8 GiB, with a reward model 57.9; with a head on the policy 36.3; GRPO 36.3, DAPO 35.2. `proximo plan` predicts 1.4 to 3.9 % more", "python -m proximo_lab.experiments.memory --compile --steps 6 --out runs/memory", MEMORY),
    Claim(2, "with enough rollouts most good and bad cases are covered", "blog post on GRPO"),
    Claim(3, "broad coverage costs less data work than DPO's", "blog post on GRPO"),
    Claim(4, "the rollout takes most of the time", "blog post on GRPO", "does not hold here", "22 % of a step of the demo on a CPU (20.9 to 23.0, 5 seeds of 10 steps, under load; timings.jsonl has the phases). It holds for larger models: 59 % of a step of 0.6 B parameters on a GPU (2.24 of 3.79 s, measured once)", "proximo train arithmetic --steps 10 --seed 0", "../performance.md"),
    Claim(5, "a token-level loss steadies training when lengths differ", "DAPO §3.3, by a blog post"),
    Claim(6, "no-signal groups are all wrong early and all right late", "blog post on DAPO; §3.2 has the second half"),
    Claim(7, "discarding no-signal groups makes rollouts more efficient", "blog post on DAPO §3.2", "not detectable at this size", "at equal tokens DAPO is 0.8 points below PPO (−2.4 to +0.8, 3 seeds; 1.6 could have been seen): it drops 32 % of what it samples, and the others train on 30 to 34 % without an advantage", "proximo compare five", FIVE),
    Claim(8, "a soft penalty on length gives shorter and better answers", "blog post on DAPO §3.4"),
    Claim(9, "mixtures of experts need a sequence ratio", "GSPO §5.3", "holds here", "at 8e-4 GRPO with a token clip that blocks 36 % of the tokens (GSPO 44 %) collapses as often as GSPO, in 5 of 8 seeds; on shorter copies at a rate of 3e-3 GRPO collapses in 8 of 8 seeds, GSPO in 2 of 8 (Fisher p = 0.007); at a third of that rate neither does, and GRPO is as good", "python -m proximo_lab.experiments.moe_stability --learning-rate 3e-3 --seeds 0 1 2 3 4 5 6 7", MOE),
    Claim(10, "sampler and learner disagree in a mixture, and replay aligns them", "R3 (arXiv 2510.11370); a blog post credits it to GSPO", "holds here", "with router noise of 0.01 the gap of log-probs in untrained mixtures falls from 0.00135 (0.00104 to 0.00167, 4 seeds) to 0.0001 (0.000085 to 0.00011) with the sampler's routes. The task score has nothing to repair: −0.6 points from a mild mismatch (−2.7 to +1.5, 8 seeds; `python -m proximo_lab.experiments.moe_stability --learning-rate 1e-3`)", "pytest tests/samplers/test_mismatch.py -k routers_noise", MOE),
    Claim(11, "a soft gate is more stable than a hard clip", "SAPO, abstract", "does not hold here", "on a mixture at 3e-3 SAPO collapses in 8 of 8 seeds, as GRPO does; at 1e-3 in 4 of 8 where GRPO does in none (Fisher p = 0.08)", "python -m proximo_lab.experiments.moe_stability --learning-rate 1e-3 --seeds 0 1 2 3 4 5 6 7", MOE, decides="sapo"),
    Claim(12, "a higher temperature for negative advantages steadies training", "SAPO §3"),
    Claim(13, "GSPO has steadier gradients and learns more efficiently", "GSPO §5.1"),
    Claim(14, "supervised fine-tuning must precede reinforcement learning", "blog post"),
    Claim(15, "the clip keeps the ratio near 1", "PPO §3"),
    Claim(16, "a KL term prevents reward hacking", "InstructGPT; blog post on GRPO", "holds here", "against a learned reward, 4 seeds: without KL the true reward ends at 0.57, 0.14, 0.00 and 0.20 with the highest learned reward, with it at 0.91 to 0.94: a difference of 0.69 (0.31 to 1.07)", "proximo train pipeline-demo", LOG),
    Claim(17, "without a value model a step takes less time", "DeepSeekMath §4.1", "holds here", "a run of PPO takes 18 % longer than one of GRPO on a mixture (+15.6 to +20.9, the study's first 5 seeds) and 12 % on chains (+5.4 to +18.8), by the seconds in the results of five-mixture and five-chain. Milliseconds of a step on sums, one thread: PPO 310, GRPO 253, SAPO 196; seconds of a step of 0.6 B parameters on one H200, means of six: PPO with a value model of its own 3.93, GRPO 2.85; with a head on the policy 3.25, and with a reward model both 3.20 (memory.md)", "proximo study five-mixture", FIVE),
    Claim(18, "the value model is a liability", "blog post on GRPO", "not detectable at this size", "GRPO against PPO with its own layer as value model: +0.4 points (−3.8 to +4.6, 3 seeds; 4.2 could have been seen)", "proximo compare five", FIVE),
    Claim(19, "a higher upper clip prevents entropy collapse", "DAPO §3.1"),
    Claim(20, "with dynamic sampling every batch has a gradient", "DAPO §3.2", "exact", "rows without an advantage: 0.0 % in every step of DAPO, 30 to 34 % for the others", "proximo compare five", FIVE),
    Claim(21, "DAPO converges faster than GRPO", "DAPO §4", "not detectable at this size", "at equal tokens −1.2 points against GRPO in the mean of 3 seeds; against PPO −0.8 (−2.4 to +0.8; 1.6 could have been seen)", "proximo compare five", FIVE),
    Claim(22, "spikes of single tokens bend the gradient, a sequence ratio does not", "blog post on GSPO §3", reason="needs stored steps with spikes and their gradients under both ratios (proximo replay RUN --step N --as gspo --model DIR --halves gives the cosine of one step, and that of its halves); single tokens of a copy hardly ever spike. Text of hundreds of tokens would do"),
    Claim(23, "GSPO converges faster on mixtures", "GSPO §5.1", "does not hold here", "at 1e-3 both end alike, 97 to 99 % held-out in the mean of 8 seeds; at 3e-3 GSPO survives where GRPO does not", "python -m proximo_lab.experiments.moe_stability --learning-rate 1e-3 --seeds 0 1 2 3 4 5 6 7", MOE),
    Claim(24, "for small steps and even ratios SAPO acts like GSPO", "SAPO §4"),
    Claim(25, "otherwise SAPO turns into GRPO", "blog post on SAPO", "exactly wrong", "the gate is A·r·sech² of each token at any spread; GRPO's is 0 or 1. Neither is a limit of the other", "pytest tests/losses/test_laws.py", "../algorithms/sapo.md"),
    Claim(26, "entropy collapses because advantages are uniform", "blog post on DAPO"),
    Claim(27, "one noisy reward function hurts, several help", "blog post on DAPO"),
    Claim(28, "reasoning needs no KL term", "DAPO §2.3", not_needed="left out"),
    Claim(29, "old and new policy use different experts", "GSPO §5.3", "holds here", "one update changes 1.2 % of the chosen experts at 1e-3 and 6.5 % at 3e-3 (8 seeds; the paper has about 10 % in a model of 30 B)", "python -m proximo_lab.experiments.moe_stability --learning-rate 3e-3 --seeds 0 1 2 3 4 5 6 7", MOE),
    Claim(30, "GSPO gives every token of a completion the same weight", "GSPO §4.2", "exact", "to rounding (3e-17)", "pytest tests/losses/test_laws.py", "../algorithms/gspo.md"),
    Claim(31, "GSPO steadies dense models too", "blog post on GSPO"),
    Claim(32, "value estimates get worse with length, so PPO fails on long outputs", "blog post on GRPO"),
    Claim(33, "the variance of importance sampling grows with the distance of the policies", "textbook", "exact", "enumerated over all texts of three letters", "pytest tests/samplers/test_mismatch.py", MISMATCH),
    Claim(34, "outside the clip's range the gradient is exactly 0", "PPO §3", "exact", "in two of four cases of sign and side; in the other two it is not", "pytest tests/losses/test_gates.py", "../algorithms/ppo.md"),
    Claim(35, "rare tokens are capped and likely ones never", "DAPO §3.1", "exact", "an edge of 1.2 lets 0.2 rise to 0.24 and 0.9 to 1; with 1.28, 0.2 to 0.256", "pytest tests/losses/test_gates.py", "../algorithms/dapo.md"),
    Claim(36, "equal rewards teach nothing", "DAPO §3.2", "exact", "advantages of a group with equal rewards are 0", "pytest tests/losses/test_advantages.py", "../algorithms/grpo.md"),
    Claim(37, "few effective samples make training unstable", "DAPO §3.2"),
    Claim(38, "long answers are diluted by the mean over a sequence", "DAPO §3.3", "exact", "tokens of answers of 200 and 10 count 1/400 and 1/20, with the token mean 1/210 each", "pytest tests/losses/test_pieces.py", "../algorithms/dapo.md"),
    Claim(39, "long bad answers go uncorrected", "DAPO §3.3"),
    Claim(40, "a token-level loss keeps entropy in bounds", "DAPO §3.3"),
    Claim(41, "cut-off answers make rewards noisy", "DAPO §3.4"),
    Claim(42, "token-level training collapses suddenly on long text", "GSPO §1", reason="the answers are copies of 32 letters, and of 64 by a dense model; text of hundreds of tokens, and a model that writes it, would do"),
    Claim(43, "GSPO keeps only good samples", "blog post on GSPO", "exactly wrong", "there is no such step: GSPO clips sequences on both sides", "proximo explain gspo", "../algorithms/gspo.md"),
    Claim(44, "routing replay limits what can be learned", "GSPO §5.3", "not detectable at this size", "GSPO collapses in 2 of 8 seeds with and without replay; at 1e-3 all end within seeds; 5 of 8 could have been seen", "python -m proximo_lab.experiments.moe_stability --learning-rate 3e-3 --seeds 0 1 2 3 4 5 6 7", MOE),
    Claim(45, "GSPO needs no routing replay", "GSPO §5.3", "not detectable at this size", "GRPO does not need it either: with replay it collapses in 6 of 8 seeds at 8e-4 and in 7 at 7e-4, without in 8 and in 6. It takes routers that move more than weights do. On shorter copies at 3e-3 GSPO collapses in 2 of 8 with and without replay, GRPO in all", "python -m proximo_lab.experiments.moe_stability --learning-rate 3e-3 --seeds 0 1 2 3 4 5 6 7", MOE, not_needed="added"),
    Claim(46, "a collapse cannot be recovered from by resuming or tuning", "GSPO §1"),
    Claim(47, "one token's ratio corrects nothing and only adds noise", "GSPO §3", "does not hold here", "enumerated: the gradient's bias is 32 % without correction, 24 % with token ratios, 2 % with sequence ratios: token ratios correct a quarter, and the bias is smaller with them in 25 of 30 draws (66 to 93 %)", "pytest tests/samplers/test_mismatch.py", MISMATCH),
    Claim(48, "changed routes trigger the clip abnormally often", "GSPO §5.3", "does not hold here", "1.4 % of the tokens blocked without and 1.5 % with replay at 1e-3 (8 seeds)", "python -m proximo_lab.experiments.moe_stability --learning-rate 1e-3 --seeds 0 1 2 3 4 5 6 7", MOE),
    Claim(49, "without 1/|y| the sequence ratio explodes with length", "GSPO §4.1", "exact", "log-ratios of 0.05 a token: the product spreads by 0.1 over 4 tokens and 3.2 over 4096, the mean by 0.025 and 0.0008; so the band, too, belongs to a length", "proximo explain gspo", "../algorithms/gspo.md"),
    Claim(50, "only the exponential keeps the correction unbiased", "blog post on GSPO", "exactly wrong", "a difference of log-probs is biased, and so is s: enumerated over texts of four symbols, the true mean is 2, s gives 0.860, no weight 0.8, the difference 0.073", "pytest tests/samplers/test_mismatch.py", "../algorithms/gspo.md"),
    Claim(51, "varying token weights give GRPO noisier gradients in long text", "GSPO §4.2", reason="copies of 64 letters are not long text, and with the ratio GSPO's band changes what the clip lets through: text of hundreds of tokens, and arms that differ in the ratio alone, would do"),
    Claim(52, "the unbounded side of the clip accumulates noise", "blog post on GSPO"),
    Claim(53, "reward falls later than drift shows", "blog post on GSPO"),
    Claim(54, "GSPO clips orders of magnitude more and yet learns more efficiently", "GSPO §5.2"),
    Claim(55, "the k3 estimator is unbiased with low variance", "Schulman's note on KL", "exact", "unbiased; enumerated over three symbols, its spread is lower than k1's near the reference (0.076 against 0.391 at a KL of 0.085) and may be higher far from it (7.3 against 0.8 at 2.2); its gradient is that of the other direction's KL", "pytest tests/losses/test_pieces.py", "../algorithms/grpo.md"),
    Claim(56, "dropping the standard deviation removes a bias by difficulty", "Dr. GRPO §3.1"),
    Claim(57, "each step of the chain from PPO to SAPO is an improvement", "blog post", "not detectable at this size", "none of GRPO, DAPO, GSPO and SAPO differs from PPO by more than noise at equal tokens (3 seeds; intervals from −6.9 to +4.6 points; 0.8 to 4.2 could have been seen)", "proximo compare five", FIVE),
)
# fmt: on
