"""What a rule of classification sees, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from stallwatch.diagnosis.kinds import Kind
from stallwatch.diagnosis.scene import Scene
from stallwatch.diagnosis.signals import Process, Thread
from stallwatch.diagnosis.suspect import Suspect
from stallwatch.diagnosis.verdict import Edge
from stallwatch.diagnosis.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Call:
    """What a rule says: a kind, how sure it is, and the evidence that each claim rests on."""

    kind: Kind
    confidence: str
    reasons: tuple[str, ...]
    thread: Thread | None = None  # the thread to show instead of the lane's own
    others: tuple[Kind, ...] = ()
    channel: str = ""  # "writer -> reader": a channel is accused, not the lane that reads it
    instead: Suspect | None = None  # another process that the rule found and accuses
    edges: tuple[Edge, ...] = ()  # waits that nobody declared and the rule found


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules look at."""

    scene: Scene
    suspect: Suspect
    process: Process
    thread: Thread  # the lane's own; an empty one for channels and unknown lanes

    @property
    def words(self) -> Vocabulary:
        return self.scene.words

    @property
    def channel(self) -> bool:
        return self.suspect.lane is not None and self.suspect.lane.channel
