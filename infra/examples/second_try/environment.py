"""An environment of two turns: a wrong answer gets one more try at the same problem."""

import re


class SecondTry:
    """One object per sample, made before its first turn is answered."""

    def __init__(self, prompt, answer, metadata, *, second=0.5):
        self.prompt = prompt
        self.answer = answer
        self.second = second

    def step(self, completion, turn, is_last):
        """Text goes on with the policy's next turn; a number, or named parts of it, ends."""
        numbers = re.findall(r"\d+", completion)
        is_right = bool(numbers) and numbers[-1] == self.answer
        if not is_right and not is_last:
            return self.prompt
        reward = is_right * (1.0 if turn == 1 else self.second)
        return reward, {"first": float(is_right and turn == 1), "retried": float(turn > 1)}
