"""What is wrong with a checkpoint, in one sentence. Whoever supplied the files must act."""

from __future__ import annotations


class BadCheckpoint(Exception):
    """A checkpoint that cannot be served. `tensor` is empty when the file as a whole is at fault."""

    def __init__(self, problem: str, *, file: str, tensor: str = "") -> None:
        super().__init__(f"{file}: tensor {tensor} {problem}" if tensor else f"{file}: {problem}")
        self.problem = problem
        self.file = file
        self.tensor = tensor


class UnsupportedModel(BadCheckpoint):
    """A sound checkpoint that asks for something this engine does not do; `feature` names it."""

    def __init__(self, feature: str, *, file: str) -> None:
        super().__init__(f"{feature} is not supported by this engine", file=file)
        self.feature = feature
