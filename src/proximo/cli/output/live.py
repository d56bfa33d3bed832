"""The live view of a run in a terminal."""

from collections.abc import Mapping

from rich.console import Console
from rich.console import Group as Stack
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from proximo.rl.progress import measure, prompt_text, share, sparkline, summary
from proximo.runs.records import Collected, Evaluation
from proximo.system.safe_text import MAX_SHOWN, visible


class LiveView:
    """A bar, the outcome as a sparkline, the step's numbers and one completion."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, refresh_per_second=4, transient=True)
        self.steps, self.outcomes, self.before = 0, [], None

    def start(self, steps: int, before: Evaluation) -> None:
        self.steps, self.before = steps, before
        if before.problems:
            self.console.print(f"held-out {measure(before)} before: {share(before)}", highlight=False)
        self.live.start()

    def stepped(
        self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float], collected: Collected
    ) -> None:
        self.outcomes.append(metrics["outcome"])
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            f"step {step}/{self.steps}",
            ProgressBar(self.steps, step, width=40),
            f"{sum(seconds.values()):.1f} s a step",
        )
        sample = Text()
        if collected.groups:
            group = collected.groups[0]
            best = max(group.rollouts, key=lambda rollout: rollout.grade.reward)
            sample = Text(visible(f"{prompt_text(group.problem)}{best.completion.text}".strip(), 200), style="italic")
            sample.append(f"   outcome {best.grade.outcome:g}", style="dim")
        self.live.update(
            Stack(bar, Text(f"outcome {sparkline(self.outcomes)}", style="cyan"), Text(summary(metrics)), sample)
        )

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self.console.print(f"held-out {measure(evaluation)} after step {step}: {share(evaluation)}", highlight=False)

    def warned(self, step: int, message: str) -> None:
        # As Text, not markup: a message may quote text from a model or a file.
        self.console.print(Text(f"warning at step {step}: {visible(message, MAX_SHOWN)}", style="yellow"))

    def stop(self) -> None:
        self.live.stop()
