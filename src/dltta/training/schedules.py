"""Source side. How does the learning rate go on while a network is trained?"""

import math
from typing import Literal

Schedule = Literal["constant", "polynomial", "cosine"]


def share_of_rate(schedule: Schedule, progress: float) -> float:
    """What is left of the first learning rate when `progress`, from 0 to 1, of the training is done.

    Polynomial is nnU-Net's, with exponent 0.9; cosine is half a wave. A function of the progress alone: a resumed
    training needs no state of it.
    """
    match schedule:
        case "polynomial":
            return float((1 - progress) ** 0.9)
        case "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        case _:
            return 1.0
