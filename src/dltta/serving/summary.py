"""What did a run do, and which of the stream's predictions need somebody to look at them?"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dltta.quality.decision import Outcome, Reason

# Reasons that put the prediction itself into doubt. The others say which of two plausible models predicts.
REVIEW = frozenset(Reason) - {Reason.IN_DISTRIBUTION, Reason.FLIP_CONSISTENCY, Reason.CHANGE, Reason.QUALITY}
MOSTLY = 0.5  # a stream with more images than this share far out of distribution ends with a warning


def needs_review(line: Mapping[str, Any]) -> bool:
    """Whether somebody should look at the case of a line of the log: by its expected quality, or by the reason."""
    return line.get("review") is True or line.get("reason") in REVIEW


@dataclass
class Summary:
    """What a run did, and what the guard decided since the stream began."""

    predicted: int = 0
    repeated: int = 0  # the same content under another name: predicted, not learned from again
    windowed: int = 0  # of the predicted: in windows, because the whole did not fit into memory
    already_predicted: int = 0  # in an earlier run
    failed: list[str] = field(default_factory=list)  # one sentence each
    decisions: dict[str, int] = field(default_factory=dict)  # of the whole stream, by outcome; empty without a guard
    reasons: dict[str, int] = field(default_factory=dict)  # of the whole stream, by reason code
    to_review: int = 0  # predictions of the whole stream that somebody should look at
    head: str = ""  # hash of the log's last line; who keeps it elsewhere finds a log that was cut back
    notices: list[str] = field(default_factory=list)  # what was said at the start, one sentence each
    waiting_for: int | None = None  # pairs that the memory still waits for, so that no rate was dynamic yet
    warnings: list[str] = field(default_factory=list)  # what is to be said at the end, one sentence each

    def conclude(self, outcomes: Mapping[str, int], reasons: Mapping[str, int], reviews: int = 0) -> None:
        """Add what the log says about the whole stream; `reviews` counts the cases that `needs_review` marks."""
        self.decisions = {str(outcome): outcomes.get(outcome, 0) for outcome in Outcome} if outcomes else {}
        self.reasons = dict(Counter(reasons).most_common())
        self.to_review = reviews
        if self.windowed:
            self.warnings.append(
                f"{self.windowed} of {self.predicted} images were too large for --max-memory and were predicted in "
                "windows, each a step of its own (`windows` in stream.jsonl)"
            )
        if self.waiting_for is not None:
            self.warnings.append(
                f"the memory still waits for {self.waiting_for} predictions, so no rate was dynamic: every update had "
                "the initial one; more images fill it, and --prefill begins with source images (train --with memory)"
            )
        if self.mostly_out_of_distribution:
            self.warnings.append(
                f"{self._far} of {sum(self.decisions.values())} images are far out of distribution (ood-score): the "
                "model was not trained for such images; have the predictions reviewed before anybody uses them"
            )

    @property
    def mostly_out_of_distribution(self) -> bool:
        """Whether more than half of the stream's images are too far from source images to learn from."""
        return self._far > MOSTLY * sum(self.decisions.values())

    @property
    def exit_code(self) -> int:
        """0 all predicted, 1 some cases have no prediction, 3 most images are far out of distribution."""
        if self.mostly_out_of_distribution:
            return 3
        return 1 if self.failed else 0

    @property
    def _far(self) -> int:
        return self.reasons.get(Reason.OOD_SCORE, 0)
