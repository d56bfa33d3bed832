"""Source of each default: the paper's equation or section, in our words.

"Second-hand" marks what was read neither in the paper nor in its authors' code, but in notes that agree with others' code.
A stage that a card does not mention is left empty by the paper too.
"""

from dataclasses import dataclass, field

from proximo import algorithms
from proximo.algorithms import Algorithm


@dataclass(frozen=True)
class Card:
    """A named algorithm, and the source of its choices by stage."""

    name: str
    value: Algorithm
    title: str
    paper: str
    idea: str
    sources: dict[str, str] = field(default_factory=dict)


GROUP_STD = "mean and std of the group; the paper fixes neither ddof nor epsilon, the reference systems use ddof 1"
OLD = "the policy that sampled"

CARDS = (
    Card(
        "ppo", algorithms.PPO, "Proximal Policy Optimization", "arXiv 1707.06347",
        "A value model says what to expect; a clip keeps each token's probability near the policy that sampled.",
        {
            "shape": "practice of RLHF, not of the paper: k1 in the reward, 0.05 as in TRL's PPO (second-hand)",
            "keep": "every sample is used",
            "advantage": "eq. 11–12, λ 0.95; γ 1 since a completion ends; whitening is practice, not in the paper (second-hand)",
            "anchor": "eq. 6: the policy before the update",
            "ratio": "eq. 6: one ratio per action, here per token",
            "gate": "eq. 7, ε 0.2; no dual clip",
            "weights": "eq. 7 averages over all timesteps of the batch",
            "extra": "eq. 9: squared error of the value; clip and coefficient 0.1 as in TRL's PPO (second-hand)",
        },
    ),
    Card(
        "grpo", algorithms.GRPO, "Group Relative Policy Optimization", "DeepSeekMath, arXiv 2402.03300",
        "Siblings of the same prompt replace the value model: a completion is good if it beats its group.",
        {
            "keep": "every group is used",
            "advantage": f"section 4.1.2: {GROUP_STD}",
            "anchor": f"eq. 3: {OLD}",
            "ratio": "eq. 3: per token",
            "gate": "eq. 3; ε is never stated and inert with their single update per batch; 0.2 is PPO's",
            "kl": "eq. 3 and 4: in the loss, not in the reward; coefficient 0.04 (section 4.2)",
            "weights": "eq. 3: mean over a completion's tokens, then over completions",
        },
    ),
    Card(
        "dapo", algorithms.DAPO, "Decoupled Clip and Dynamic sAmpling Policy Optimization", "arXiv 2503.14476",
        "GRPO for long reasoning: more room upwards, no dead groups, every token equal, a soft end for long answers.",
        {
            "shape": "eq. 13: from L_max − L_cache a line down to −1; they use 20480 and 4096, which is 20 %. Eq. 7 has rewards of ±1, so that 1 is half the distance from wrong to right: u keeps it so on any scale",
            "keep": "eq. 11: some but not all answers of a group are right; other prompts fill the batch",
            "advantage": f"eq. 9: {GROUP_STD}",
            "anchor": f"eq. 8: {OLD}",
            "ratio": "eq. 9: per token",
            "gate": "eq. 10: raise the upper bound alone, 0.2 and 0.28, so that unlikely tokens can grow",
            "kl": "section 2.3: removed, since long reasoning moves far from the start",
            "weights": "eq. 12 divides by a group's tokens (PromptMean, literally); every released code by the step's",
        },
    ),
    Card(
        "gspo", algorithms.GSPO, "Group Sequence Policy Optimization", "arXiv 2507.18071",
        "The reward judges the sequence, so the ratio and the clip do too; stable for mixtures of experts.",
        {
            "keep": "every group is used",
            "advantage": f"eq. 6: {GROUP_STD}",
            "anchor": f"eq. 5: {OLD}",
            "ratio": "eq. 7: geometric mean over the tokens, so that lengths are comparable",
            "gate": "eq. 5 with the ranges of section 5.1: 3e-4 and 4e-4",
            "kl": "left out of eq. 5 for brevity",
            "weights": "eq. 5: mean over completions",
        },
    ),
    Card(
        "sapo", algorithms.SAPO, "Soft Adaptive Policy Optimization", "arXiv 2511.20347",
        "A smooth gate instead of a clip: a token far from the old policy counts less, never suddenly nothing.",
        {
            "keep": "every group is used",
            "advantage": f"as GRPO: {GROUP_STD}",
            "anchor": f"eq. 5: {OLD}",
            "ratio": "eq. 5: per token (second-hand)",
            "gate": "eq. 6: (4/τ)·σ(τ(r − 1)); τ 1.0 and 1.05 from the experiments (second-hand)",
            "kl": "none in the objective (second-hand)",
            "weights": "eq. 5: mean over a completion's tokens, then over completions (second-hand)",
        },
    ),
    Card(
        "gspo-token", algorithms.GSPO_TOKEN, "GSPO-token", "arXiv 2507.18071",
        "GSPO that lets advantages differ by token; identical to it while they do not.",
        {"ratio": "eq. 13–14: the sequence ratio's value, each token's own gradient", "gate": "section 5.1"},
    ),
    Card(
        "dr-grpo", algorithms.DR_GRPO, "GRPO done right", "arXiv 2503.20783",
        "Removes two biases: the division by the std and the division by the length.",
        {"advantage": "section 3.2: no std", "weights": "section 3.2: a constant, the generation budget", "gate": "ε 0.2"},
    ),
    Card(
        "rloo", algorithms.RLOO, "REINFORCE Leave-One-Out", "arXiv 2402.14740",
        "The whole completion is one action; the siblings' mean is its baseline.",
        {
            "shape": "KL in the reward, 0.03 (second-hand)",
            "advantage": "mean of the other siblings, no std (second-hand)",
            "gate": "plain REINFORCE, no clip (second-hand)",
            "weights": "log-probs of a completion are summed (second-hand)",
        },
    ),
    Card(
        "reinforce-pp", algorithms.REINFORCE_PP, "REINFORCE++", "arXiv 2501.03262",
        "No groups: returns normalised over the whole batch.",
        {
            "shape": "k1 in the reward; β 0.001 (second-hand): the authors' scripts have 1e-4 to 0.01",
            "advantage": "return-to-go, normalised over the tokens of the batch (the authors' code)",
            "gate": "0.2 (the authors' code)",
            "weights": "mean over a completion's tokens, as the authors' code until April 2025; a token mean since",
        },
    ),
    Card(
        "reinforce-pp-baseline", algorithms.REINFORCE_PP_BASELINE, "REINFORCE++ with a group baseline", "arXiv 2501.03262",
        "The group's mean as baseline, the batch as scale.",
        {
            "advantage": "group mean, normalised over the tokens of the batch (the authors' code)",
            "gate": "0.2 (the authors' code)",
            "kl": "the authors add k2 in the loss, 1e-5 to 1e-3; none here",
        },
    ),
    Card(
        "cispo", algorithms.CISPO, "Clipped IS-weight Policy Optimization", "MiniMax-M1, arXiv 2506.13585",
        "Caps the weight of a token instead of dropping its gradient.",
        {
            "shape": "section 3.1: length penalty of DAPO",
            "keep": "section 3.1: dynamic sampling of DAPO",
            "gate": "section 3.1: no lower bound; ε_high is not disclosed; a cap of 5 is TRL's, and ScaleRL saw no difference between 4, 5 and 8",
            "weights": "section 3.1: over all tokens",
        },
    ),
    Card(
        "gmpo", algorithms.GMPO, "Geometric-Mean Policy Optimization", "arXiv 2507.20673",
        "Clips each token in log space, then takes the geometric mean.",
        {"gate": "e^−0.4 to e^0.4, on the side the advantage pushes to (the authors' code)"},
    ),
    Card(
        "gpg", algorithms.GPG, "Group Policy Gradient", "arXiv 2504.02546",
        "Plain policy gradient, made up for the groups that teach nothing.",
        {"advantage": "α = B/(B − M), M rows in dead groups; no std (the authors' code)", "gate": "no surrogate"},
    ),
    Card(
        "bnpo", algorithms.BNPO, "Beta Normalization Policy Optimization", "arXiv 2506.02864",
        "Divides by a Beta density fitted to the success rates, instead of by the std.",
        {"advantage": "α = 1 + a/3, β = 1 + b/3 by moments, unbiased variance (the authors' code)"},
    ),
    Card(
        "vapo", algorithms.VAPO, "Value-based Augmented PPO", "arXiv 2504.05118",
        "PPO for long reasoning: the value model learns from whole returns, λ grows with length.",
        {
            "advantage": "λ_critic 1, λ_policy 1 − 1/(0.05·l) (section 4); whitening as PPO",
            "gate": "0.2 and 0.28 (section 5.1)",
            "weights": "eq. 7: token mean",
            "extra": "eq. 9: 0.1 · NLL of correct completions",
        },
    ),
    Card(
        "clip-cov", algorithms.CLIP_COV, "Clip-Cov", "The Entropy Mechanism, arXiv 2505.22617",
        "Keeps entropy by dropping a few tokens whose covariance would collapse it.",
        {"select": "settings: share 2e-4, bounds 1 and 5", "gate": "none in the formula; the authors' scripts have widths of 1, which stop r > 2 alone"},
    ),
    Card(
        "kl-cov", algorithms.KL_COV, "KL-Cov", "The Entropy Mechanism, arXiv 2505.22617",
        "Keeps entropy by holding the tokens of highest covariance near the old policy.",
        {"select": "settings: share 2e-3 (7B; 2e-4 for 32B), coefficient 1", "gate": "no clip"},
    ),
    Card(
        "lite-ppo", algorithms.LITE_PPO, "Lite PPO", "arXiv 2508.08221",
        "Group mean, batch std, token mean: GRPO with two choices changed.",
        {"advantage": "section 3.1: group mean, batch std", "weights": "token mean"},
    ),
    Card(
        "luspo", algorithms.LUSPO, "Length-Unbiased Sequence Policy Optimization", "arXiv 2602.05261",
        "GSPO whose loss is multiplied by the length.",
        {"gate": "section 5.1: 2e-3 and 2.5e-3", "weights": "eq. 7: sum over tokens, mean over completions"},
    ),
    Card(
        "vespo", algorithms.VESPO, "Variational Sequence-Level Soft Policy Optimization", "arXiv 2602.10693",
        "A smooth weight on the product ratio that fades on both sides of 1.",
        {"gate": "k 2, λ 3 for A ≥ 0; k 3, λ 2 for A < 0 (the authors' scripts)", "weights": "token mean"},
    ),
    Card(
        "distill", algorithms.DISTILL, "On-policy distillation", "arXiv 2306.13649; Thinking Machines Lab, 2025",
        "The student samples; a teacher's log-prob of each token, minus the student's own, is the token's advantage.",
        {
            "advantage": "minus the reverse KL of each token, no discount: each token counts for itself (tinker-cookbook's code)",
            "gate": "PPO's clip, which matters after the first of several updates",
            "weights": "token mean",
        },
    ),
    Card(
        "rft", algorithms.RFT, "Rejection-sampling fine-tuning", "RAFT, arXiv 2304.06767; ReST-EM, arXiv 2312.06585",
        "Sample, keep the correct completions, raise their log-probs.",
        {
            "keep": "completions whose task score is above 0; RAFT keeps the best of each prompt (second-hand)",
            "advantage": "1: the loss is the negative log-likelihood",
            "weights": "token mean, as in supervised fine-tuning",
        },
    ),
    Card(
        "online-dpo", algorithms.ONLINE_DPO, "Online DPO", "DPO, arXiv 2305.18290; online: arXiv 2402.04792",
        "DPO's loss on the best and the worst completion that the policy has just sampled for a prompt; the paper samples two.",
        {
            "keep": "a pair needs two task scores that differ",
            "advantage": "the gradient of DPO's eq. 7, β 0.1, for the policy that sampled",
            "gate": "one update per batch, so that the gradient is exact",
            "weights": "log-probs of a completion are summed; a mean over prompts",
        },
    ),
    Card(
        "gspo-product", algorithms.GSPO_PRODUCT, "GSPO in some blog posts", "no paper",
        "The ratio of whole completions without the root: far too wide, its gradient |y| times GSPO's.",
        {"ratio": "a blog post leaves out the 1/|y| of GSPO's eq. 7", "gate": "PPO's ε"},
    ),
    Card(
        "sapo-sequence", algorithms.SAPO_SEQUENCE, "SAPO in some blog posts", "no paper",
        "A bare sigmoid on the product ratio, advantages divided by temperatures of 1 and 0.5.",
        {"advantage": "temperatures moved out of the gate", "ratio": "GSPO's, without the root", "gate": "σ(5(r − 1)), no 4/τ"},
    ),
)  # fmt: skip


GRPO_CARD = next(each for each in CARDS if each.value == algorithms.GRPO)
"""The trunk of the tree: what a neighbour does not change, it has from here."""


def card(name: str) -> Card | None:
    """Card of a name; underscores and capitals are forgiven."""
    wanted = name.lower().replace("_", "-")
    return next((each for each in CARDS if each.name == wanted), None)
